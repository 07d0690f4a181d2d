#!/usr/bin/env bash
# Generate from a few sample prompts; arguments go to `tenfold generate`.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
scripts/venv.sh

prompts=(
    "The capital of France is"
    "Paging lets a server of language models"
    "Once upon a time, ten people asked one machine"
)
for prompt in "${prompts[@]}"; do
    .venv/bin/tenfold generate "$@" "$prompt"
done
