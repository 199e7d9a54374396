#!/usr/bin/env bash
# Memory systems on PerLTQA with one answer model, one run after the other, and a page that compares them. Started again, it
# goes on with the conversation at which it was stopped. $SYSTEMS, $RUNS (their folder) and $PRESET may be set.
#
#   launch/bench_perltqa.sh --config.data.path=perltmem_en_v2.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs="${RUNS:-runs/perltqa}"
read -ra systems <<< "${SYSTEMS:-none recency rag_utterance rag_session oracle full_context policy}"

for system in "${systems[@]}"; do
  python -m attrimem_jax.main --config="configs/eval_perltqa.py:${PRESET:-smollm2}" --workdir="$runs/$system" \
    --config.eval.system="$system" "$@"
done
python -m attrimem_jax.view.benchmark --out="$runs/comparison.html" "${systems[@]/#/$runs/}"
