"""The last lines of a training run, as text: how accuracy moved, and the reward of every step as a row of bars."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_BARS = "▁▂▃▄▅▆▇█"


def bars(values: Sequence[float], width: int = 60) -> str:
  """One character per value, or per mean of neighbours where there are more than `width`; equal values are flat."""
  finite = np.asarray([v for v in values if v is not None and np.isfinite(v)], np.float64)
  if not finite.size:
    return ""
  means = np.array([part.mean() for part in np.array_split(finite, min(width, finite.size))])
  span = np.ptp(means)
  levels = (means - means.min()) / (span if span > 0 else 1.0) * (len(_BARS) - 1)
  return "".join(_BARS[round(level)] for level in levels)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
  """Accuracy of the first and the last evaluation with their intervals, and the reward curve, from rows of metrics."""
  lines = []
  evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
  if evaluated:
    lines.append("held-out accuracy: " + " → ".join(_interval(row) for row in (evaluated[0], evaluated[-1])))
    if evaluated[-1].get("eval/gain") is not None:
      lines.append(f"gain on the same questions: {_interval(evaluated[-1], 'gain', '+')}")
  rewards = [row["train/reward"] for row in rows if row.get("train/reward") is not None]
  if rewards:
    ends = max(1, min(5, len(rewards) // 2))
    first, last = np.mean(rewards[:ends]), np.mean(rewards[-ends:])
    lines.append(f"reward: {bars(rewards)}  {first:.3f} → {last:.3f} (means of the first and last {ends} steps)")
  return "\n".join(lines)


def _interval(row: Mapping[str, Any], name: str = "accuracy", sign: str = "") -> str:
  mean, low, high = (row[f"eval/{name}{end}"] for end in ("", "_low", "_high"))
  return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
