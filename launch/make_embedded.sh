#!/usr/bin/env bash
# Makes the models that the package ships, from nothing: tokenizer, answer model, policy; then measures them.
# Two CPU cores: half a minute for the tokenizer, three quarters of an hour for the answer model, seven minutes for the
# policy, some minutes for the scores.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs="${1:-runs/embedded}"

python -m attrimem_jax.text.train --out attrimem_jax/assets/tokenizer
sft() { # preset, flags...
  python -m attrimem_jax.main --config="configs/sft.py:$1" --workdir="$runs/$1" --config.export.out="$runs/$1/export" "${@:2}"
}
sft answer
sft dates --config.answer.model="$runs/answer/export"
sft refresh --config.answer.model="$runs/dates/export"
cp "$runs/refresh/export/"* attrimem_jax/assets/answer/
sft policy
cp "$runs/policy/export/"* attrimem_jax/assets/policy/
"$(dirname "${BASH_SOURCE[0]}")/score_embedded.sh" "$runs"
