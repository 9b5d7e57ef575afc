#!/usr/bin/env bash
# The OpenAI server with no hardware: examples/serve_on_vnpu.sh [CHECKPOINT [VLLM OPTIONS]]
#
# Then, from anywhere:
#   curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
#     -d '{"model": "tiny_llama", "prompt": "def ", "max_tokens": 48, "temperature": 0}'
set -euo pipefail
cd "$(dirname "$0")/.."

checkpoint=${1:-checkpoints/tiny_llama}
# With --shutdown-timeout Ctrl-C leaves the engine the time to close its devices.
exec vnpu run -- vllm serve "$checkpoint" --served-model-name "$(basename "$checkpoint")" \
  --shutdown-timeout 15 "${@:2}"
