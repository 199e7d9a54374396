#!/usr/bin/env bash
# What the shipped models reach on held-out synthetic conversations: with a perfect memory, with the memory of the careless
# teacher that the policy learned from, with none, and with the policy's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs="${1:-runs/embedded}"

for memory in reference teacher empty policy; do
  echo "memory: $memory"
  rm -rf "$runs/score-$memory"
  python -m attrimem_jax.main --config=configs/grpo_token.py --workdir="$runs/score-$memory" --config.job=evaluate \
    --config.eval.memory="$memory" --config.eval.episodes=128 \
    --config.data.teacher.miss=0.5 --config.data.teacher.chatter=0.3 --config.data.teacher.blur=0.3
done
