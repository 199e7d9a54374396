"""Sums over micro-batches, and batches that cannot be cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.rl.accumulation import Totals, accumulate, split


def square(params, x):
  return jnp.sum((params * x) ** 2), Totals({"count": jnp.float32(x.size)}, {"largest": jnp.max(x)})


def test_hand_worked():
  # d/dw of (w·1)² + (w·2)² + (w·3)² + (w·4)² at w = 2 is 2·2·30
  loss, gradient, totals = accumulate(square, jnp.float32(2), jnp.asarray([[1.0, 2.0], [3.0, 4.0]]))
  assert (loss, gradient, totals.sums["count"], totals.maxima["largest"]) == (120, 120, 4, 4)


def test_maxima_may_be_negative():
  _, _, totals = jax.jit(accumulate, static_argnums=0)(square, jnp.float32(1), jnp.asarray([[-3.0], [-2.0]]))
  assert totals.maxima["largest"] == -2


def test_split_keeps_the_order_and_passes_none_by():
  parts = split({"a": np.arange(6), "b": None}, 3)
  np.testing.assert_array_equal(parts["a"], [[0, 1], [2, 3], [4, 5]])
  assert parts["b"] is None


@pytest.mark.parametrize("count", [0, 4, 7])
def test_a_batch_that_cannot_be_split(count):
  with pytest.raises(ValueError, match=f"6 prefixes cannot be split into {count} micro-batches"):
    split(np.zeros((6, 2)), count)


def test_arrays_that_disagree_about_the_batch():
  with pytest.raises(ValueError, match=r"\[4, 6\] rows"):
    split([np.zeros(6), np.zeros(4)], 2)
