#!/usr/bin/env bash
# Start the server; arguments go to `tenfold serve`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh
exec .venv/bin/tenfold serve "$@"
