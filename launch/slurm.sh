#!/usr/bin/env bash
# Slurm: one process per node, which drives all GPUs of that node.
#
#   sbatch launch/slurm.sh --config=configs/grpo_token.py:qwen3_4b --config.data.path=/shared/locomo10.json \
#     --config.mesh.data=2 --config.mesh.fsdp=8 --config.rollout.histories=16 --workdir=/shared/runs/qwen3_4b
#
# Edit: nodes, GPUs of a node, time, and how Python is found. mesh.data x mesh.fsdp x mesh.tensor = nodes x GPUs, and
# rollout.histories / rl.micro_batches has to be a multiple of mesh.data x mesh.fsdp. The run directory and the models
# lie on a file system that all nodes see. Submitted again after its end, the same command goes on.
#SBATCH --job-name=attrimem
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=attrimem-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"

# source /shared/venv/bin/activate

export ATTRIMEM_COORDINATOR=auto # addresses and numbers of the processes come from Slurm
exec srun --kill-on-bad-exit=1 python -m attrimem_jax.main "$@"
