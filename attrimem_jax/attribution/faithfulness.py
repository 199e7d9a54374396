"""How far a surrogate can be believed, on masks that it was not fitted to; functions of arrays alone.

LDS and the top-k drop are ContextCite's measures (arXiv 2409.00729, section 4).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Faithfulness:
  """What the held-out masks of one problem say about its attribution.

  Attributes:
    lds: rank correlation of predicted and true targets (linear datamodelling score).
    r2: fraction of the targets' variance that the prediction explains; negative where their mean predicts better.
    drops: nats that the answer's log-probability loses when the k sources of largest weight are removed, for each k.
    masks: number of held-out masks.
  """

  lds: float
  r2: float
  drops: Mapping[int, float]
  masks: int


def lds(predicted: np.ndarray, actual: np.ndarray) -> float:
  """Spearman's rank correlation of float[M] and float[M]; equal values share their mean rank.

  0 where either is constant or there are fewer than two masks: such a prediction tells no mask from another.
  """
  x, y = (_ranks(np.asarray(values, np.float64)) for values in (predicted, actual))
  x, y = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
  scale = np.sqrt(np.sum(x * x) * np.sum(y * y))
  return float(np.sum(x * y) / scale) if scale > 0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
  """Ranks from 1; [10, 30, 30] → [1, 2.5, 2.5]."""
  _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def r2(predicted: np.ndarray, actual: np.ndarray) -> float:
  """1 - sum of squared errors over sum of squares around the mean, both float[M]; 0 where `actual` is constant."""
  predicted, actual = np.asarray(predicted, np.float64), np.asarray(actual, np.float64)
  if len(actual) < 2 or np.ptp(actual) == 0:
    return 0.0
  return float(1 - np.sum((actual - predicted) ** 2) / np.sum((actual - actual.mean()) ** 2))


def without_top(weights: np.ndarray, counts: Sequence[int]) -> np.ndarray:
  """Masks bool [len(counts), S] that remove the k sources of largest weight; of equal weights the earlier goes first.

  >>> without_top(np.array([0.5, 2.0, -1.0]), (1, 2))
  array([[ True, False,  True],
         [False, False,  True]])
  """
  place = np.empty(len(weights), int)
  place[np.argsort(-weights, kind="stable")] = np.arange(len(weights))
  return place >= np.asarray(counts, int)[:, None]
