"""One memory system on PerLTQA, all of it: writes each history once, asks all its questions, scores every one of them.

  python -m attrimem_jax.main --config=configs/eval_perltqa.py:smollm2 --config.data.path=perltmem_en_v2.json

Presets are those of `grpo_token.py`. `--config.eval.system` chooses whose memories are asked (the policy's by default;
`--config.policy.checkpoint` names the run that trained it), `--config.eval.answers` scores a file of answers instead.
`launch/bench_perltqa.sh` compares all systems. The file of questions lies beside that of the memories.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.job = "benchmark"
  config.data.name = "perltqa"
  config.data.split = config.eval.split = "all"
  config.eval.episodes = 31
  config.eval.questions = 0
  config.rollout.horizon.sessions = 0
  config.rollout.horizon.bank = "empty"
  config.policy.overlong = "split"
  config.reward.kind = "f1"
  return config
