#!/usr/bin/env bash
# One machine with 8 GPUs. One process drives them all, so nothing has to find anything.
#
#   launch/gpus.sh --config=configs/grpo_token.py:qwen3_4b --config.data.path=locomo10.json --workdir=runs/qwen3_4b
#
# Edit: CUDA_VISIBLE_DEVICES for other cards; with another number of them also --config.mesh.fsdp=<number>.
# See first what it needs:  ... --config.job=plan
set -euo pipefail
cd "$(dirname "$0")/.."

export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,1,2,3,4,5,6,7}"
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}" # of the memory of each card

exec python -m attrimem_jax.main "$@"
