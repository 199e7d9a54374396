"""Intervals against closed forms, against a plain loop in float64, and against how often they hold the truth."""

import math

import numpy as np
import pytest

from attrimem_jax.evaluation.bootstrap import Interval, crossed_interval, difference_interval, mean_interval


def _plain(groups, samples, confidence, seed):
  """The same statistic by a loop over lists: draw groups, pool their scores, average, take quantiles by sorting."""
  rng = np.random.default_rng(seed)
  means = []
  for row in rng.integers(len(groups), size=(samples, len(groups))):
    pooled = [score for group in row for score in groups[group]]
    means.append(math.fsum(pooled) / len(pooled))
  return np.quantile(np.array(means, np.float64), [(1 - confidence) / 2, (1 + confidence) / 2])


def test_two_questions_by_hand():
  # Resampled means of (0, 1) are 0, 1/2, 1/2, 1 with equal chance: the middle half is exactly 1/2 to within sampling.
  interval = mean_interval([0.0, 1.0], samples=4000, confidence=0.4)
  assert interval == Interval(0.5, 0.5, 0.5)
  assert mean_interval([0.0, 1.0], samples=4000, confidence=0.99) == Interval(0.5, 0.0, 1.0)


def test_equal_to_a_plain_loop():
  scores = np.random.default_rng(3).random(37)
  interval = mean_interval(scores, samples=200, confidence=0.9, seed=11)
  np.testing.assert_allclose([interval.low, interval.high], _plain(scores[:, None], 200, 0.9, 11), atol=1e-12)
  assert interval.mean == pytest.approx(math.fsum(scores) / 37, abs=1e-12)


def test_clusters_equal_to_a_plain_loop():
  groups = [[1.0, 0.0, 1.0], [0.0], [0.5, 0.25], [1.0] * 5]
  scores = [score for group in groups for score in group]
  names = [f"history {i}" for i, group in enumerate(groups) for _ in group]
  interval = mean_interval(scores, clusters=names, samples=300, seed=5)
  np.testing.assert_allclose([interval.low, interval.high], _plain(groups, 300, 0.95, 5), atol=1e-12)


def test_clusters_need_not_stand_together():
  scores, names = [1.0, 0.0, 1.0, 0.0], ["a", "b", "a", "b"]
  assert mean_interval(scores, clusters=names, confidence=0.99) == Interval(0.5, 0.0, 1.0)


def test_questions_of_one_conversation_widen_the_interval():
  rng = np.random.default_rng(0)
  scores = np.repeat(rng.integers(0, 2, 20), 10)  # ten questions that stand and fall together
  alone = mean_interval(scores)
  together = mean_interval(scores, clusters=np.arange(200) // 10)
  assert together.high - together.low > 2 * (alone.high - alone.low)


def test_as_wide_as_the_normal_approximation():
  scores = np.random.default_rng(1).random(2000)
  interval = mean_interval(scores, samples=4000)
  half = 1.96 * scores.std() / math.sqrt(2000)
  assert interval.high - interval.low == pytest.approx(2 * half, rel=0.05)


def test_covers_the_truth_as_often_as_it_says():
  rng = np.random.default_rng(2)
  intervals = [mean_interval(rng.random(60) < 0.7, samples=200, confidence=0.9) for _ in range(200)]
  covered = np.mean([interval.low <= 0.7 <= interval.high for interval in intervals])
  assert (
    0.82 <= covered <= 0.96
  )  # 0.9 give or take three standard errors of 200 trials, and the method's own small bias


def test_pairing_removes_what_questions_share():
  rng = np.random.default_rng(4)
  before = rng.normal(size=100)
  interval = difference_interval(before + 0.1, before)
  np.testing.assert_allclose([interval.mean, interval.low, interval.high], 0.1, atol=1e-12)


def test_difference_is_the_interval_of_differences():
  after, before = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]
  names = ["a", "a", "b", "b"]
  assert difference_interval(after, before, clusters=names, seed=3) == mean_interval(
    [1, 0, 0, 1], clusters=names, seed=3
  )


def test_the_seed_decides():
  scores = np.random.default_rng(0).random(30)
  assert mean_interval(scores, seed=1) == mean_interval(scores, seed=1)
  assert mean_interval(scores, seed=1) != mean_interval(scores, seed=2)


def test_drawing_in_blocks_changes_nothing(monkeypatch):
  scores = np.random.default_rng(0).random(30)
  whole = mean_interval(scores, samples=500)
  monkeypatch.setattr("attrimem_jax.evaluation.bootstrap._BLOCK", 100)
  assert mean_interval(scores, samples=500) == whole


def test_nothing_to_average_is_nan():
  interval = mean_interval([])
  assert all(math.isnan(value) for value in (interval.mean, interval.low, interval.high))


@pytest.mark.parametrize("scores", [[0.7], [0.7] * 8, [True] * 3])
def test_equal_scores_have_no_width(scores):
  interval = mean_interval(scores)
  assert interval.low == pytest.approx(interval.mean, abs=1e-12)
  assert interval.high == pytest.approx(interval.mean, abs=1e-12)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"scores": [1.0, math.nan]}, "leave out what was not judged"),
    ({"scores": [[1.0]]}, r"shape \(1, 1\)"),
    ({"scores": [1.0], "clusters": ["a", "b"]}, "1 scores and 2 clusters"),
    ({"scores": [1.0], "samples": 0}, "samples=0"),
    ({"scores": [1.0], "confidence": 95}, "confidence=95"),
  ],
)
def test_refuses(arguments, message):
  with pytest.raises(ValueError, match=message):
    mean_interval(**arguments)


def test_a_paired_difference_needs_the_same_questions():
  with pytest.raises(ValueError, match="got 2 and 1"):
    difference_interval([1.0, 0.0], [1.0])


def test_prints_as_mean_and_interval():
  assert str(Interval(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"


def test_crossed_is_a_double_sum_over_drawn_runs_and_conversations():
  sums, counts = np.array([[1.0, 4.0, 0.5], [2.0, 3.0, 0.0]]), np.array([2.0, 5.0, 1.0])
  found = crossed_interval(sums, counts, samples=2000, seed=3)
  assert found.mean == pytest.approx((1 + 4 + 0.5 + 2 + 3) / 16)
  rng, means = np.random.default_rng(8), []
  for _ in range(20_000):
    r, c = rng.integers(2, size=2), rng.integers(3, size=3)
    means.append(sum(sums[i, j] for i in r for j in c) / (2 * counts[c].sum()))
  np.testing.assert_allclose([found.low, found.high], np.quantile(means, [0.025, 0.975]), atol=0.04)


def test_crossed_is_wider_where_runs_differ_and_a_constant_where_nothing_does():
  conversations = np.random.default_rng(0).random((1, 200))
  same = crossed_interval(np.repeat(conversations, 5, axis=0), np.ones(200))
  apart = crossed_interval(conversations + np.array([[-0.2], [-0.1], [0.0], [0.1], [0.2]]), np.ones(200))
  assert apart.high - apart.low > 1.5 * (same.high - same.low) > 0
  assert crossed_interval(np.full((2, 3), 0.5), np.ones(3)) == Interval(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
  ("sums", "counts"), [(np.ones(3), np.ones(3)), (np.ones((2, 3)), np.ones(2)), (np.full((1, 1), np.nan), np.ones(1))]
)
def test_crossed_refuses_what_is_no_table(sums, counts):
  with pytest.raises(ValueError, match=r"give finite sums \[R, C\]"):
    crossed_interval(sums, counts)
