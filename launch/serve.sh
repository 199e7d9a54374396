#!/usr/bin/env bash
# Serves models to clients of OpenAI's API at http://127.0.0.1:8000/v1 until it is stopped by Ctrl-C or SIGTERM.
#
#   launch/serve.sh --config.serve.port=8001 --config.serve.models="('smollm2-135m-instruct',)"
set -euo pipefail
cd "$(dirname "$0")/.."

exec python -m attrimem_jax.main --config=configs/serve.py "$@"
