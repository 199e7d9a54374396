"""Outcome-only GRPO: every token has the advantage of its rollout and nothing else: RL_Out of arXiv 2607.21106.

It is `grpo_token.py` without attribution, and has the same presets. The paper reports 70.19 on LoCoMo for Qwen3-4B
without SFT, against 72.05 with token rewards.

  python -m attrimem_jax.main --config=configs/grpo_outcome.py
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.attribution.unit = "none"
  config.rl.lambda_ = 0.0
  return config
