"""Signs that a policy collapses: it stops exploring, runs away from where it started, or earns nothing any more."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Limits:
  """What counts as a sign, and for how many steps on end it must show; `patience` 0 sees no collapse.

  Attributes:
    patience: steps.
    entropy: mean entropy of the sampled tokens, in nats: lower is a sign.
    kl: mean k3 to the starting policy: higher is a sign.
    reward: mean reward: lower is a sign.
  """

  patience: int
  entropy: float
  kl: float
  reward: float


def signs(metrics: Mapping[str, Any], limits: Limits) -> set[str]:
  """The signs that a step's metrics show ("train/entropy" …); what was not measured is no sign."""
  if not limits.patience:
    return set()
  entropy, kl, reward = (metrics.get(f"train/{name}") for name in ("entropy", "kl", "reward"))
  found = {
    "entropy": entropy is not None and entropy < limits.entropy,
    "kl": kl is not None and kl > limits.kl,
    "reward": reward is not None and reward < limits.reward,
  }
  return {name for name, shown in found.items() if shown}


def collapsed(rows: Sequence[Mapping[str, Any]], limits: Limits) -> str:
  """The sign that every one of the last `patience` training steps showed, or "".

  Args:
    rows: of metrics, in order; those without "train/reward" are of evaluations and do not count.
  """
  steps = [row for row in rows if "train/reward" in row][-limits.patience :]
  if not limits.patience or len(steps) < limits.patience:
    return ""
  shared = set.intersection(*(signs(row, limits) for row in steps))
  return min(shared, default="")
