"""Advantages by hand, and the degenerate groups that must give exactly 0."""

import numpy as np
import pytest

from attrimem_jax.rl.advantages import (
  combine,
  flat,
  outcome_advantages,
  process_advantages,
  reward_statistics,
)


def test_a_malformed_rollout_is_pushed_away_from():
  # mean 3/4, population std √3/4: −√3 for the failure and 1/√3 for the rest
  np.testing.assert_allclose(outcome_advantages([[0, 1, 1, 1]]), [[-(3**0.5), *[3**-0.5] * 3]], rtol=1e-15)
  np.testing.assert_allclose(outcome_advantages([[0, 1, 1, 1]], divide=False), [[-0.75, 0.25, 0.25, 0.25]])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 16, 31])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 0.85, -3.3, 1e6, 1e-30])
def test_equal_rewards_give_exactly_zero(size, value):
  rewards = np.full((2, size), value, np.float32)
  np.testing.assert_array_equal(outcome_advantages(rewards), np.zeros((2, size)))
  noisy = rewards * (1 + np.finfo(np.float32).eps * (np.arange(size) % 2))
  np.testing.assert_array_equal(outcome_advantages(noisy), np.zeros((2, size)))


def test_the_noise_is_real_in_float32():
  rewards = np.full(8, 0.7, np.float32)
  mean = np.float32(0.7) - np.float32(6e-8)  # as XLA on a CPU sums it
  std = np.sqrt(np.mean((rewards - mean) ** 2))
  assert np.all(np.abs((rewards - mean) / (std + np.float32(1e-8))) > 0.5)


def test_groups_do_not_mix_and_rows_are_groups_even_if_equal():
  both = outcome_advantages([[1, 2], [1, 2], [10, 30]])
  np.testing.assert_allclose(both, [[-1, 1]] * 3)


def test_without_a_reward_a_rollout_leaves_its_group():
  got = outcome_advantages([[0, 1, 5, np.nan]], np.array([[True, True, False, False]]))
  np.testing.assert_allclose(got, [[-1, 1, 0, 0]])
  only = outcome_advantages([[0.0, 1.0], [3.0, 4.0]], np.array([[True, False], [False, False]]))
  np.testing.assert_array_equal(only, np.zeros((2, 2)))


def test_a_reward_that_is_not_finite_is_an_error():
  with pytest.raises(ValueError, match=r"reward at \[1, 0\] is not finite"):
    outcome_advantages([[0, 1], [np.nan, 1]])


def test_huge_rewards_do_not_overflow():
  np.testing.assert_allclose(outcome_advantages([[1e300, -1e300]]), [[1, -1]])


def test_no_groups():
  assert outcome_advantages(np.zeros((0, 4)).reshape(0, 4)).shape == (0, 4)


def test_process_zscore_pools_the_sources_of_the_group():
  rewards = np.array([[1.0, 99.0, 3.0], [5.0, 7.0, 99.0]])
  sources = np.array([[True, False, True], [True, True, False]])
  std = 5**0.5  # of 1, 3, 5, 7
  np.testing.assert_allclose(process_advantages(rewards, sources), np.array([[-3, 0, -1], [1, 3, 0]]) / std)


def test_process_scale_keeps_zeros_and_signs():
  got = process_advantages(np.array([0.0, 3.0, -4.0, 8.0]), np.array([True, True, True, False]), normalise="scale")
  np.testing.assert_allclose(got, np.array([0, 3, -4, 0]) / (25 / 3) ** 0.5)


def test_process_none_passes_through():
  np.testing.assert_array_equal(
    process_advantages(np.array([7.0, -9.0, 1.0]), np.array([True, True, False]), normalise="none"), [7, -9, 0]
  )


def test_a_rare_source_is_clipped():
  rewards = np.zeros(1000)
  rewards[0] = 1.0
  got = process_advantages(rewards, np.ones(1000, bool))
  assert got[0] == 5  # z would be √999 ≈ 31.6
  assert process_advantages(rewards, np.ones(1000, bool), clip=40)[0] == pytest.approx(999**0.5)


@pytest.mark.parametrize("normalise", ["zscore", "scale"])
@pytest.mark.parametrize("rewards", [[], [0.0], [0.0, 0.0, 0.0]])
def test_pools_that_say_nothing(normalise, rewards):
  got = process_advantages(np.array(rewards), np.ones(len(rewards), bool), normalise=normalise)
  np.testing.assert_array_equal(got, np.zeros(len(rewards)))


def test_one_or_equal_sources_have_no_zscore():
  np.testing.assert_array_equal(process_advantages(np.array([2.0, 9.0]), np.array([True, False])), [0, 0])
  np.testing.assert_array_equal(process_advantages(np.full(3, 0.7), np.ones(3, bool)), [0, 0, 0])


def test_no_sources_give_no_process_advantage_whatever_the_rewards():
  for normalise in ("zscore", "scale", "none"):
    got = process_advantages(np.array([np.nan, 3.0]), np.zeros(2, bool), normalise=normalise)
    np.testing.assert_array_equal(got, [0, 0])


def test_unknown_normalisation():
  with pytest.raises(ValueError, match="'z' is unknown; choose one of zscore, scale, none"):
    process_advantages(np.ones(2), np.ones(2, bool), normalise="z")


def test_combination_by_hand():
  got = combine(
    np.array([1.0, -1.0]), np.array([[2.0, 5.0], [3.0, np.nan]]), np.array([[True, False], [True, False]]), 0.5
  )
  np.testing.assert_array_equal(got, [[2, 1], [0.5, -1]])
  assert got.dtype == np.float32
  np.testing.assert_array_equal(combine(np.array([0.3]), np.ones((1, 4)), np.ones((1, 4), bool), 0.0), np.float32(0.3))


def test_spread_within_groups_is_not_spread_across_the_batch():
  statistics = reward_statistics([[1, 1], [9, 9]])
  assert (statistics.mean, statistics.std_within_group, statistics.std_across_batch) == (5, 0, 4)
  assert (statistics.flat_fraction, statistics.invalid) == (1, 0)
  mixed = reward_statistics([[0, 2, 7], [5, 5, 5]], np.array([[True, True, False], [True, True, True]]))
  assert (mixed.std_within_group, mixed.flat_fraction, mixed.invalid) == (0.5, 0.5, 1)


def test_flat_is_relative_for_large_rewards():
  assert flat(np.array([1e6, 1e6 + 0.5]))
  assert not flat(np.array([0.0, 1e-5]))
