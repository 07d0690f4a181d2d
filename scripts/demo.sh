#!/usr/bin/env bash
# Serve the same sessions with memory reserved and paged, and draw the arena; arguments go to benchmarks.demo.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh
exec .venv/bin/python -m benchmarks.demo "$@"
