"""One memory system on LongMemEval, all of it: writes each history once, asks and scores all its questions.

  python -m attrimem_jax.main --config=configs/eval_longmemeval.py:smollm2 --config.data.path=longmemeval_s.json \\
    --config.data.splits=splits.json --config.eval.split=test

Presets are those of `grpo_token.py`. `--config.eval.system` chooses whose memories are asked (the policy's by default;
`--config.policy.checkpoint` names the run that trained it), `--config.eval.answers` scores a file of answers instead.
`launch/bench_longmemeval.sh` compares all systems. Without a file of splits it asks all 500 questions. The gold of
single-session-preference is a rubric, for a judge alone.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), preset)
  config.job = "benchmark"
  config.data.name = "longmemeval"
  config.data.split = config.eval.split = "all"
  config.eval.episodes = 500
  config.eval.questions = 0
  config.rollout.horizon.sessions = 0
  config.rollout.horizon.bank = "empty"
  config.policy.overlong = "split"
  config.reward.kind = "f1"
  return config
