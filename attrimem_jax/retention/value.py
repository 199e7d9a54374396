"""A memory's value V(m) = Σ w_i f_i(m) with non-negative weights, and how the weights are learned (arXiv 2606.12945).

Cases are padded to one shape, and a case's score needs the places of its gold memories alone, not a sort: a memory is
kept if fewer than k are worth more, where of two equal ones the earlier counts as worth more. Everything is jitted over
all cases at once.

Letters: C cases, n memories of a case (padded), S gold memories of a case (padded), F factors.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True, eq=False)
class Cases:
  """What retention is learned and scored on.

  Attributes:
    factors: float32 [C, n, F]; padding holds zeros.
    size: int32 [C], memories of each case.
    gold: int32 [C, S], places of the memories that should have been kept; -1 is padding.
  """

  factors: np.ndarray
  size: np.ndarray
  gold: np.ndarray

  @classmethod
  def pack(cls, factors: Sequence[np.ndarray], gold: Sequence[Sequence[int]]) -> "Cases":
    """Pads single cases, [n, F] and gold places each.

    Raises:
      ValueError: there is no case, a case has no gold memory or one that it does not hold, or a factor is not finite.
    """
    if not factors:
      raise ValueError("there are no cases: give at least one with gold memories")
    for number, (table, places) in enumerate(zip(factors, gold, strict=True)):
      if not len(places) or min(places) < 0 or max(places) >= len(table):
        raise ValueError(f"case {number} has gold {list(places)} of {len(table)} memories: give one place or more")
      if not np.isfinite(table).all():
        raise ValueError(f"case {number} has a factor that is not finite: mend it, a NaN would hide how memories rank")
    size = np.array([len(table) for table in factors], np.int32)
    packed = np.zeros((len(factors), size.max(), factors[0].shape[1]), np.float32)
    places_cs = np.full((len(factors), max(map(len, gold))), -1, np.int32)
    for number, (table, places) in enumerate(zip(factors, gold, strict=True)):
      packed[number, : len(table)], places_cs[number, : len(places)] = table, places
    return cls(packed, size, places_cs)


def budgets(size: np.ndarray, keep: float) -> np.ndarray:
  """max(1, ⌊keep · n⌋) memories of each case: int32 [C]."""
  if not 0 < keep <= 1:
    raise ValueError(f"keep is {keep}: use a fraction above 0, up to 1")
  return np.maximum(1, np.floor(keep * size + 1e-9)).astype(np.int32)


@jax.jit
def kept(values: jax.Array, size: jax.Array, gold: jax.Array, budget: jax.Array) -> jax.Array:
  """Share of each case's gold memories among its `budget` best: float32 [C] of values [C, n]."""
  place = jnp.arange(values.shape[1])
  theirs = jnp.take_along_axis(values, jnp.maximum(gold, 0), axis=1)[:, :, None]
  others, inside = values[:, None, :], (place < size[:, None])[:, None, :]
  before = (others > theirs) | ((others == theirs) & (place < gold[:, :, None]))
  rank = (before & inside).sum(axis=2)
  real = gold >= 0
  return ((rank < budget[:, None]) & real).sum(axis=1) / real.sum(axis=1)


def hill_climb(
  cases: Cases,
  fit: np.ndarray,
  keep: float,
  *,
  seed: int = 1,
  live: Sequence[int] | None = None,
  iterations: int = 120,
  sigma: float = 0.5,
  decay: float = 0.92,
) -> np.ndarray:
  """Learns non-negative weights by stochastic hill climbing, from all ones.

  Each time every weight moves with probability one half by a normal draw of width `sigma`, which shrinks by `decay`;
  the move stands if more gold memories are kept, averaged over the cases to fit on.

  Args:
    fit: bool [R, C], the cases that each of R runs may see; the runs are independent and compiled as one.
    keep: share of memories to keep.
    live: factors that are learned; the others keep weight 0. None for all.

  Returns:
    float32 [R, F].
  """
  used = _used(cases, fit, live)
  arrays = (cases.factors, cases.size, cases.gold, budgets(cases.size, keep), used)
  keys = jax.random.split(jax.random.key(seed), len(fit))
  return np.asarray(_climb(iterations, sigma, decay, arrays, keys, fit.astype(np.float32)))


@functools.partial(jax.jit, static_argnums=0)
def _climb(iterations: int, sigma: float, decay: float, arrays: tuple, keys: jax.Array, fit: jax.Array) -> jax.Array:
  factors, size, gold, budget, used = arrays

  def score(weights: jax.Array, share: jax.Array) -> jax.Array:
    return kept(factors @ weights, size, gold, budget) @ share

  def run(given: tuple[jax.Array, jax.Array]) -> jax.Array:
    key, mask = given
    share = mask / mask.sum()

    def step(state: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
      weights, best = state
      moves, sizes = jax.random.split(jax.random.fold_in(key, number))
      change = jax.random.normal(sizes, used.shape) * sigma * decay**number
      tried = jnp.maximum(weights + jnp.where(jax.random.bernoulli(moves, 0.5, used.shape), change, 0), 0) * used
      reached = score(tried, share)
      better = reached > best
      return (jnp.where(better, tried, weights), jnp.where(better, reached, best)), None

    (weights, _), _ = jax.lax.scan(step, (used, score(used, share)), jnp.arange(iterations))
    return weights

  return jax.lax.map(run, (keys, fit))


def pairwise(
  cases: Cases,
  fit: np.ndarray,
  *,
  live: Sequence[int] | None = None,
  penalty: float = 1e-4,
  iterations: int = 300,
  rate: float = 0.3,
) -> np.ndarray:
  """Learns non-negative weights by ranking: gold memories above the others of their case.

  It minimises the mean over cases, and within a case over pairs of a gold and another memory, of
  log(1 + exp(V(other) - V(gold))) + `penalty` |w|². That is convex (RankNet's loss on a linear value), so neither seed
  nor start matters, as they do for `hill_climb`.

  Args:
    fit, live: as in `hill_climb`.
    penalty: keeps weights finite where a factor separates all pairs.
    iterations, rate: of Adam, each step followed by a projection to non-negative weights; the rate falls to 0.

  Returns:
    float32 [R, F].
  """
  used = _used(cases, fit, live)
  arrays = (cases.factors, cases.size, cases.gold, used)
  return np.asarray(_rank(iterations, rate, penalty, arrays, fit.astype(np.float32)))


def pair_loss(weights: jax.Array, factors: jax.Array, size: jax.Array, gold: jax.Array, share: jax.Array) -> jax.Array:
  """The mean that `pairwise` minimises, without penalty; `share` [C] weighs cases and sums to 1."""
  values = factors @ weights
  place, real = jnp.arange(values.shape[1]), gold >= 0
  theirs = jnp.take_along_axis(values, jnp.maximum(gold, 0), axis=1)
  is_gold = ((place[None, :, None] == gold[:, None, :]) & real[:, None, :]).any(axis=-1)
  other = (place < size[:, None]) & ~is_gold
  pairs = real[:, :, None] & other[:, None, :]
  losses = jnp.where(pairs, jax.nn.softplus(values[:, None, :] - theirs[:, :, None]), 0)
  return (losses.sum((1, 2)) / jnp.maximum(pairs.sum((1, 2)), 1)) @ share


@functools.partial(jax.jit, static_argnums=0)
def _rank(iterations: int, rate: float, penalty: float, arrays: tuple, fit: jax.Array) -> jax.Array:
  factors, size, gold, used = arrays
  optimizer = optax.adam(optax.linear_schedule(rate, 0.0, iterations))

  def run(mask: jax.Array) -> jax.Array:
    share = mask / mask.sum()

    def loss(weights: jax.Array) -> jax.Array:
      return pair_loss(weights, factors, size, gold, share) + penalty * weights @ weights

    def step(state: tuple, _: None) -> tuple[tuple, None]:
      weights, moments = state
      updates, moments = optimizer.update(jax.grad(loss)(weights), moments)
      return (jnp.maximum(weights + updates, 0) * used, moments), None

    (weights, _), _ = jax.lax.scan(step, (used, optimizer.init(used)), length=iterations)
    return weights

  return jax.lax.map(run, fit)


def _used(cases: Cases, fit: np.ndarray, live: Sequence[int] | None) -> np.ndarray:
  """1 for each factor that is learned: float32 [F]. Raises ValueError where a run has nothing to fit on."""
  if not fit.any(axis=1).all():
    raise ValueError("a run has no case to fit on: give every row of `fit` one case or more")
  used = np.zeros(cases.factors.shape[2], np.float32)
  used[list(range(len(used)) if live is None else live)] = 1
  return used
