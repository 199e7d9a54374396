"""The shared-prefix layout, cell by cell, and how many widths there can be."""

import numpy as np
import pytest

from attrimem_jax.nn.batching import bucket, pack


def test_buckets_hold_their_length_and_are_few():
  assert [bucket(n) for n in (0, 1, 5, 16, 17, 100, 128, 130, 300, 400)] == [
    16,
    16,
    16,
    16,
    32,
    112,
    128,
    192,
    384,
    512,
  ]
  widths = [bucket(n, 16) for n in range(1, 8193)]
  assert all(width >= n and width % 16 == 0 for n, width in enumerate(widths, 1))
  assert widths == sorted(widths)
  assert len(set(widths)) <= 8 + 2 * 6
  assert all(width < 1.5 * n + 16 for n, width in enumerate(widths, 1)), "at most half of a row is padding"


def test_a_bucket_is_its_own_bucket():
  assert all(bucket(bucket(n, 8), 8) == bucket(n, 8) for n in range(1, 600))


def test_every_token_has_its_cell():
  shared = pack(
    [[1, 2], [3]], [[([4, 5], [6]), ([7], [8, 9])], [([10], [])]], step=3, completion_width=2, prompt_width=3
  )
  np.testing.assert_array_equal(shared.prefix, [[1, 2, 0], [3, 0, 0]])
  np.testing.assert_array_equal(shared.prefix_mask, [[1, 1, 0], [1, 0, 0]])
  np.testing.assert_array_equal(
    shared.suffix, [[[0, 4, 5, 6, 0], [0, 0, 7, 8, 9]], [[0, 0, 10, 0, 0], [0, 0, 0, 0, 0]]]
  )
  np.testing.assert_array_equal(
    shared.suffix_mask, [[[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]], [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]]
  )
  assert shared.prefix_keep is None


def test_token_zero_is_a_token():
  shared = pack([[0]], [[([0], [0, 0])]], step=4)
  assert (shared.prefix_mask.sum(), shared.suffix_mask.sum()) == (1, 3)


def test_widths_and_rows_can_be_given():
  shared = pack([[1]], [[([2], [3])]], prefix_width=5, prompt_width=6, completion_width=7, rows=3)
  assert (shared.prefix.shape, shared.suffix.shape) == ((1, 5), (1, 3, 13))
  assert not shared.suffix_mask[0, 1:].any()


def test_what_cannot_be_predicted_from_is_refused():
  with pytest.raises(ValueError, match="empty prefix"):
    pack([[]], [[([1], [2])]])
  with pytest.raises(ValueError, match="row 1 of prefix 0 has an empty prompt"):
    pack([[1]], [[([1], [2]), ([], [2])]])
