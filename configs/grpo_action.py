"""GRPO with one process reward per action, the sum of its tokens' / sqrt(its length): RL_Act of arXiv 2607.21106.

It is `grpo_token.py` with another unit, and has the same presets. The paper reports 71.10 on LoCoMo for Qwen3-4B
without SFT, against 72.05 with token rewards.

  python -m attrimem_jax.main --config=configs/grpo_action.py
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.attribution.unit = "action"
  return config
