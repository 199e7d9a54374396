"""What studies compare: training runs that differ from the recipe in one place each."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

# Kinds of questions that the arms called "…_some" train on; all arms are asked all kinds in the end.
SOME = ("single-session", "multi-session")

# What the shipped policy was before its warm start.
COLD = "embedded:answer"

# Arm: the keys that it changes in the recipe, which is that of `configs/grpo_token.py`.
ARMS: Mapping[str, Mapping[str, Any]] = {
  "start": {"train.steps": 0, "optim.warmup": 0},
  "outcome": {"attribution.unit": "none", "rl.lambda_": 0.0},
  "action": {"attribution.unit": "action"},
  "token": {},
  "gradients": {"attribution.gradients": 2, "attribution.scorer": "masked"},
  "gradients_5": {"attribution.gradients": 5, "attribution.scorer": "masked"},
  "start_cold": {"train.steps": 0, "optim.warmup": 0, "policy.model": COLD},
  "outcome_cold": {"attribution.unit": "none", "rl.lambda_": 0.0, "policy.model": COLD},
  "token_cold": {"policy.model": COLD},
  "token_gold": {"attribution.explain": "gold"},
  "token_contrast": {"attribution.explain": "contrast"},
  "token_16": {"attribution.masks": ((0, 16),)},
  "token_32": {"attribution.masks": ((0, 32),)},
  "token_strong": {"rl.lambda_": 1.0},
  "outcome_some": {"attribution.unit": "none", "rl.lambda_": 0.0, "reward.kinds": SOME},
  "token_some": {"reward.kinds": SOME},
  "gradients_strong": {"attribution.gradients": 2, "attribution.scorer": "masked", "rl.lambda_": 1.0},
}


def arm_config(config: ConfigDict, name: str, seed: int) -> ConfigDict:
  """The training run that arm `name` of a study is, for one seed."""
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict({"job": "train", "seed": seed, **ARMS[name]})
  return changed
