"""Turns a checkpoint into a Hugging Face folder (weights, config, tokenizer, template) and loads it again for proof.

  python -m attrimem_jax.main --config=configs/export.py --workdir=runs/mine                 # to runs/mine/export
  python -m attrimem_jax.main --config=configs/export.py --workdir=runs/mine --config.export.out=my-policy

Seconds for the shipped policy. Where torch is installed, transformers loads the folder too and its logits are compared.
Presets name the model that was trained, as in `grpo_token.py`.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.job = "export"
  return config
