"""How sure a mean over questions is: percentile bootstrap (Efron 1979), by question or by whole episode.

Questions of one conversation stand or fall together, since they are answered from one memory. Resampling them one by
one then gives intervals that are too narrow; give `clusters` to resample whole conversations instead. With a single
cluster there is nothing to resample and the interval shrinks to the mean.
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

_BLOCK = 2**22  # numbers drawn at a time, which bounds memory to some 64 MB


@dataclasses.dataclass(frozen=True)
class Interval:
  """A mean and the interval that holds it with the given confidence; NaN where there was nothing to average."""

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
  scores: Sequence[float] | np.ndarray,
  *,
  clusters: Sequence[Hashable] | None = None,
  samples: int = 1000,
  confidence: float = 0.95,
  seed: int = 0,
) -> Interval:
  """The mean of `scores` with its percentile bootstrap interval.

  Args:
    scores: float [Q], one per question.
    clusters: [Q], what each question belongs to (its history's id); None resamples single questions.
    samples: resamples drawn.
    confidence: share of resampled means inside the interval.
    seed: the same seed gives the same interval.

  Raises:
    ValueError: a score is not finite, lengths differ, or `samples` or `confidence` is out of range.
  """
  values = _checked(scores, clusters, samples, confidence)
  if not values.size:
    return Interval(float("nan"), float("nan"), float("nan"))
  sums, counts = _cluster_sums(values, clusters)
  means = _resampled_means(sums, counts, samples, np.random.default_rng(seed))
  low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(values.mean()), float(low), float(high))


def difference_interval(
  after: Sequence[float] | np.ndarray,
  before: Sequence[float] | np.ndarray,
  *,
  clusters: Sequence[Hashable] | None = None,
  samples: int = 1000,
  confidence: float = 0.95,
  seed: int = 0,
) -> Interval:
  """`mean_interval` of `after - before` on the same questions: pairing takes out how hard each question is."""
  if len(after) != len(before):
    raise ValueError(
      f"a paired difference needs equal lengths, got {len(after)} and {len(before)}: score the same questions"
    )
  differences = np.asarray(after, np.float64) - np.asarray(before, np.float64)
  return mean_interval(differences, clusters=clusters, samples=samples, confidence=confidence, seed=seed)


def crossed_interval(
  sums: np.ndarray, counts: np.ndarray, *, samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> Interval:
  """A mean over runs that were all asked about the same conversations: runs and conversations are resampled apart.

  Differences of two arms come in as differences of their sums, paired by run and conversation. With few runs the
  interval is somewhat too narrow, as any percentile bootstrap of few numbers.

  Args:
    sums: float [R, C], the scores of each run summed over the questions of each conversation.
    counts: float [C], questions of each conversation.
    samples, confidence, seed: as in `mean_interval`.
  """
  sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
  if sums.ndim != 2 or counts.shape != sums.shape[1:] or not np.isfinite(sums).all() or counts.sum() <= 0:
    raise ValueError(
      f"got sums {sums.shape} and counts {counts.shape}: give finite sums [R, C] and counts [C], not all 0"
    )
  rng = np.random.default_rng(seed)
  runs, conversations = sums.shape
  by_run = rng.multinomial(runs, np.full(runs, 1 / runs), size=samples) / runs
  by_conversation = rng.multinomial(conversations, np.full(conversations, 1 / conversations), size=samples)
  means = np.sum((by_run @ sums) * by_conversation, axis=1) / (by_conversation @ counts)
  low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(sums.mean(axis=0).sum() / counts.sum()), float(low), float(high))


def _checked(
  scores: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | None, samples: int, confidence: float
) -> np.ndarray:
  values = np.asarray(scores, np.float64)
  if values.ndim != 1 or not np.isfinite(values).all():
    raise ValueError(
      f"scores must be a list of finite numbers, got shape {values.shape}: leave out what was not judged"
    )
  if clusters is not None and len(clusters) != values.size:
    raise ValueError(f"got {values.size} scores and {len(clusters)} clusters: give one cluster per score")
  if samples < 1 or not 0 < confidence < 1:
    raise ValueError(
      f"got samples={samples}, confidence={confidence}: use 1 or more samples, confidence between 0 and 1"
    )
  return values


def _cluster_sums(values: np.ndarray, clusters: Sequence[Hashable] | None) -> tuple[np.ndarray, np.ndarray]:
  """Sum and number of scores per cluster, clusters in order of first appearance; float64 [C] each."""
  if clusters is None:
    return values, np.ones_like(values)
  numbers: dict[Hashable, int] = {}
  index = np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])
  return np.bincount(index, weights=values), np.bincount(index).astype(np.float64)


def _resampled_means(sums: np.ndarray, counts: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
  """float64 [samples]. Drawn clusters differ in size, so a resampled mean is a ratio of sums, not a mean of means."""
  means = []
  while samples > 0:
    rows = min(samples, max(1, _BLOCK // sums.size))
    drawn = rng.integers(sums.size, size=(rows, sums.size))
    means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    samples -= rows
  return np.concatenate(means)
