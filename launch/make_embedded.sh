#!/usr/bin/env bash
# Makes the models that the package ships, from nothing: tokenizer, answer model, policy; then measures them.
# Two CPU cores: half a minute, three quarters of an hour, six minutes, a minute.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs="${1:-runs/embedded}"

python -m attrimem_jax.text.train --out attrimem_jax/assets/tokenizer
for model in answer policy; do
  python -m attrimem_jax.main --config="configs/sft.py:$model" --workdir="$runs/$model" \
    --config.export.out="attrimem_jax/assets/$model"
done
"$(dirname "${BASH_SOURCE[0]}")/score_embedded.sh" "$runs"
