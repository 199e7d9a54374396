"""Evaluates the memories of a policy on LoCoMo, all of it: writes each history once and asks all its questions.

  python -m attrimem_jax.main --config=configs/eval_locomo.py:smollm2 --config.data.path=locomo10.json

Presets are those of `grpo_token.py`; `--workdir` names a run whose newest checkpoint writes.
`--config.eval.memory=empty` asks without memory. The answers in
`evaluate/NNN.json` get the score that LoCoMo publishes from `evaluation.benchmark.score`.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.job = "evaluate"
  config.data.name = "locomo"
  config.data.split = config.eval.split = "all"
  config.eval.episodes = 10
  config.eval.questions = 0
  config.rollout.horizon.sessions = 0
  config.rollout.horizon.bank = "empty"
  config.policy.overlong = "split"
  config.reward.kind = "f1"
  return config
