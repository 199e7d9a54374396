"""Evaluates the memories of a policy on PerLTQA, all of it: writes each history once and asks all its questions.

  python -m attrimem_jax.main --config=configs/eval_perltqa.py:smollm2 --config.data.path=perltmem_en_v2.json

Presets are those of `grpo_token.py`; `--workdir` names a run whose newest checkpoint writes.
`--config.eval.memory=empty` asks without memory. The file of questions
lies beside that of the memories.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.job = "evaluate"
  config.data.name = "perltqa"
  config.data.split = config.eval.split = "all"
  config.eval.episodes = 31
  config.eval.questions = 0
  config.rollout.horizon.sessions = 0
  config.rollout.horizon.bank = "empty"
  config.policy.overlong = "split"
  config.reward.kind = "f1"
  return config
