#!/usr/bin/env bash
# Makes the models that the package ships, from nothing: tokenizer, answer model, policy; then measures them.
# Two CPU cores: half a minute for the tokenizer, about an hour for the answer model, a dozen minutes for the policy,
# some minutes for the scores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs="${1:-runs/embedded}"

python -m attrimem_jax.text.train --out attrimem_jax/assets/tokenizer
sft() { # name, preset, flags...
  python -m attrimem_jax.main --config="configs/sft.py:$2" --workdir="$runs/$1" "${@:3}"
}
sft answer answer
sft dates dates --config.answer.model="$runs/answer/export"
sft brief refresh --config.answer.model="$runs/dates/export" --config.train.steps=600 --config.optim.lr=3e-3
sft refresh refresh --config.answer.model="$runs/brief/export"
cp "$runs/refresh/export/"* attrimem_jax/assets/answer/
sft policy policy
cp "$runs/policy/export/"* attrimem_jax/assets/policy/
"$(dirname "${BASH_SOURCE[0]}")/score_embedded.sh" "$runs"
