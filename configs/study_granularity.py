"""Does finer credit learn better? Arms that differ in one place, several seeds each, with intervals (job `study`).

The claim of arXiv 2607.21106, token > action > outcome, comes from one run each. Here every arm trains the shipped
small policy from the same start on the same histories per seed, and answers the same held-out questions.

  python -m attrimem_jax.main --config=configs/study_granularity.py
  python -m attrimem_jax.main --config=configs/study_granularity.py:doubts

| preset           | arms                                                                                            |
|------------------|-------------------------------------------------------------------------------------------------|
| credit, default  | no training; outcome alone; action; token (LASSO); token by two gradients                         |
| doubts           | whose answer is explained: the given, the gold, gold against given; 8, 16 and 32 masks            |
| masks            | token credit by 8, 16 and 32 exact masks, by two gradients and by five                            |
| warm             | outcome and token credit, from the warm start and from the model before it                        |
| kinds            | outcome and token credit, trained on all kinds of questions or on some, asked all                 |
| weight           | token and gradients with λ = 0.3 and 1                                                           |
| smollm2          | outcome, action and token for three steps: SmolLM2 on real sessions, to see cost and health      |

The same command goes on where a study was stopped. `--config.study.seeds` sets how many runs there are of each arm. A
run takes the time of `grpo_token.py`, so 5 arms x 5 seeds take some hours on two cores.
"""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.config import choose, recipe


def get_config(preset: str = "") -> ConfigDict:
  config = recipe(pathlib.Path(__file__).with_name("grpo_token.py"), "smollm2" if preset == "smollm2" else "")
  config.job = "study"
  config.train.eval_every = 12
  config.eval.episodes = 128
  choose(preset, PRESETS)(config)
  return config


def credit(config: ConfigDict) -> None:
  config.study.arms = ("start", "outcome", "action", "token", "gradients")


def doubts(config: ConfigDict) -> None:
  config.study.arms = ("token", "token_gold", "token_contrast", "token_16", "token_32")


def masks(config: ConfigDict) -> None:
  config.study.arms = ("token", "token_16", "token_32", "gradients", "gradients_5")


def warm(config: ConfigDict) -> None:
  config.study.arms = ("start", "outcome", "token", "start_cold", "outcome_cold", "token_cold")


def kinds(config: ConfigDict) -> None:
  config.study.arms = ("outcome", "token", "outcome_some", "token_some")


def weight(config: ConfigDict) -> None:
  config.study.arms = ("token", "token_strong", "gradients", "gradients_strong")


def smollm2(config: ConfigDict) -> None:
  """On LongMemEval: `--config.data.path=longmemeval_oracle.json`, and a warm start (`sft.py:smollm2`) beside it."""
  config.data.name = "longmemeval"
  config.policy.checkpoint = "runs/sft-smollm2"
  config.study.arms = ("outcome", "action", "token")
  config.study.seeds = 1
  config.train.steps = 3
  config.train.eval_every = 0
  config.eval.episodes = 2


PRESETS = {
  "": credit,
  "credit": credit,
  "doubts": doubts,
  "masks": masks,
  "warm": warm,
  "kinds": kinds,
  "weight": weight,
  "smollm2": smollm2,
}
