"""Gradients of a batch that is too large for one pass, summed over micro-batches.

The loss of a micro-batch is a *sum* whose weights were computed over the whole batch beforehand. So the split changes
nothing
but the memory it takes: a mean per micro-batch would depend on how the batch happens to be cut.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

Params = Any


@struct.dataclass
class Totals:
  """Scalar metrics of one micro-batch: `sums` add up over micro-batches, of `maxima` the largest stays."""

  sums: dict[str, jax.Array]
  maxima: dict[str, jax.Array]

  def merge(self, other: "Totals") -> "Totals":
    return Totals(jax.tree.map(jnp.add, self.sums, other.sums), jax.tree.map(jnp.maximum, self.maxima, other.maxima))


LossFunction = Callable[[Params, Any], tuple[jax.Array, Totals]]


def split(batch: Any, count: int) -> Any:
  """Cut every leaf `[P, ...]` into `[count, P // count, ...]`.

  Raises:
    ValueError: P is not a multiple of `count`, or the leaves disagree about P.
  """
  sizes = sorted({leaf.shape[0] for leaf in jax.tree.leaves(batch)})
  if len(sizes) != 1:
    raise ValueError(f"a batch whose arrays have {sizes} rows cannot be split; all need the same leading axis")
  if count < 1 or sizes[0] % count:
    raise ValueError(
      f"a batch of {sizes[0]} prefixes cannot be split into {count} micro-batches; "
      f"choose a number of micro-batches that divides {sizes[0]}"
    )
  return jax.tree.map(lambda leaf: leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:]), batch)


def accumulate(loss_fn: LossFunction, params: Params, micro_batches: Any) -> tuple[jax.Array, Params, Totals]:
  """Sum loss, gradients and totals of `loss_fn(params, micro_batch)` over the leading axis of `micro_batches`.

  Returns:
    (loss, gradients, totals), each of the whole batch.
  """
  value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
  first = jax.tree.map(lambda leaf: leaf[0], micro_batches)
  (_, shapes), _ = jax.eval_shape(value_and_grad, params, first)
  start = (
    jnp.zeros((), jnp.float32),
    jax.tree.map(jnp.zeros_like, params),
    Totals(
      jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.sums),
      jax.tree.map(lambda leaf: jnp.full(leaf.shape, -jnp.inf, leaf.dtype), shapes.maxima),
    ),
  )

  def step(carry: tuple, micro_batch: Any) -> tuple[tuple, None]:
    loss, gradients, totals = carry
    (more_loss, more_totals), more = value_and_grad(params, micro_batch)
    return (loss + more_loss, jax.tree.map(jnp.add, gradients, more), totals.merge(more_totals)), None

  return jax.lax.scan(step, start, micro_batches)[0]
