#!/usr/bin/env bash
# Run the tests; arguments go to pytest.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh
exec .venv/bin/python -m pytest "$@"
