#!/usr/bin/env bash
# TPU pod: the same command on every worker of the slice; they find each other by the pod's own metadata.
#
#   TPU=my-pod ZONE=us-east5-a launch/tpu_pod.sh --config=configs/grpo_token.py:qwen3_4b \
#     --config.data.path=/mnt/shared/locomo10.json --config.mesh.fsdp=16 --config.rollout.histories=16 \
#     --workdir=/mnt/shared/runs/qwen3_4b
#
# Edit: DIRECTORY, where the repository lies on every worker, installed by pip install -e '.[tpu]'. The product of the
# mesh is the number of chips. The run directory lies on a file system that all workers mount.
set -euo pipefail

: "${TPU:?name of the TPU slice}" "${ZONE:?its zone}"
DIRECTORY="${DIRECTORY:-attrimem_jax}"

arguments="$(printf ' %q' "$@")"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all \
  --command="cd $DIRECTORY && ATTRIMEM_COORDINATOR=auto python3 -m attrimem_jax.main$arguments"
