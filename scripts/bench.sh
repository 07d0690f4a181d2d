#!/usr/bin/env bash
# Run the benchmarks; arguments go to benchmarks.run, which writes bench-results/bench.md.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh
exec .venv/bin/python -m benchmarks.run "$@"
