#!/usr/bin/env bash
# Continue a few sample prompts, all of them at once; arguments go to `tenfold generate`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh
exec .venv/bin/tenfold generate --temperature 0 --max-tokens 32 "$@" \
    "The capital of France is" \
    "Paging lets a server of language models" \
    "Once upon a time, ten people asked one machine"
