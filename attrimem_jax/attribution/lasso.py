"""LASSO for many small problems at once: which of S sources explain M measurements, with a proof of optimality.

One problem is min over b, w of 1/(2M) sum_m (y_m - b - x_m . w)^2 + alpha sum_j factor_j |w_j|: the surrogate of
ContextCite (arXiv 2409.00729, eq. 3) and AttriMem (arXiv 2607.21106, eq. 11), and scikit-learn's `Lasso` where every
factor is 1.

M is small (8 to 64 masks) and S large (thousands of tokens), so at most about M weights are not zero. Each outer step
reads x once to find the sources that violate optimality, takes the worst of them beside those in use (the working set),
and solves that small problem on its Gram matrix: sweeps of coordinate descent choose the support and the signs, Newton
steps finish what coordinate descent would need thousands of sweeps for (M masks on M - 1 sources are ill-conditioned).
The penalty of the first steps is larger and shrinks geometrically, so that the support grows instead of overshooting.

Precision. Everything is float32, yet alpha is often 1e-3 of the target's spread, where rounding alone would leave a
certified gap near 1e-4. Two things keep it near 1e-7: columns are shifted by their first row (exact for masks, and a
constant column becomes exactly 0), so that the residual can be summed in pairs of floats; and the dual point takes one
Newton step more than the weights, because a feasible point must meet |x^T r| / M <= alpha to the last digit while
weights need not.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

_EXACT = jax.lax.Precision.HIGHEST  # TPUs and newer GPUs would otherwise round the factors of a product to 8 or 10 bits
_RIDGE = 1e-6  # relative to the Gram matrix's diagonal: keeps Cholesky alive on duplicate sources
_DECAY = 0.3  # of the penalty per outer step, down to the one asked for
_ROUNDS, _NEWTONS = 4, 8  # per outer step: sweeps, and Newton steps after each
_FOLDS, _PATH = 5, 12  # of the search for a penalty by held-out measurements: parts, and penalties tried


class LassoFit(NamedTuple):
  """Solutions of B problems.

  Attributes:
    weights: f32[B, S], 0 for sources that are masked out or constant over the valid rows.
    intercept: f32[B].
    gap: f32[B], duality gap over objective: the objective is at most this fraction above the optimum.
    support: i32[B], number of weights that are not 0.
    constant: bool[B, S], valid sources that never vary: nothing can be said about them.
    steps: i32[B], outer steps taken.
  """

  weights: jax.Array
  intercept: jax.Array
  gap: jax.Array
  support: jax.Array
  constant: jax.Array
  steps: jax.Array


class _Problem(NamedTuple):
  """One problem with shifted columns and padding set to 0. `mean` f32[S] of the columns; `rows` counts valid ones."""

  x: jax.Array
  y: jax.Array
  alpha: jax.Array
  factor: jax.Array
  row_mask: jax.Array
  mean: jax.Array
  rows: jax.Array


class _Set(NamedTuple):
  """A working set of K sources: Gram matrix f32[K, K] of the centred columns, and factors f32[K]."""

  gram: jax.Array
  factor: jax.Array


class _State(NamedTuple):
  weights: jax.Array
  correlation: jax.Array  # f32[S], x^T r / M
  gap: jax.Array
  alpha: jax.Array
  steps: jax.Array


@functools.partial(jax.jit, static_argnames=("tolerance", "max_steps"))
def lasso(
  x: ArrayLike,
  y: ArrayLike,
  alpha: ArrayLike,
  row_mask: ArrayLike,
  source_mask: ArrayLike,
  factor: ArrayLike | None = None,
  *,
  tolerance: float = 1e-6,
  max_steps: int = 50,
) -> LassoFit:
  """Solves B problems to a relative duality gap of `tolerance`, or for `max_steps` outer steps (read the gap).

  Args:
    x: bool or f32[B, M, S], one row per measurement. Masked rows and sources may hold anything.
    y: f32[B, M], targets, finite in valid rows.
    alpha: f32[B], penalty, > 0.
    row_mask: bool[B, M].
    source_mask: bool[B, S].
    factor: f32[B, S] > 0 or None for ones; multiplies the penalty of a source.
  """
  alphas = jnp.asarray(alpha)[:, None]
  path = lasso_path(x, y, alphas, row_mask, source_mask, factor, tolerance=tolerance, max_steps=max_steps)
  return jax.tree.map(lambda leaf: leaf[:, 0], path)


@functools.partial(jax.jit, static_argnames=("tolerance", "max_steps"))
def lasso_path(
  x: ArrayLike,
  y: ArrayLike,
  alphas: ArrayLike,
  row_mask: ArrayLike,
  source_mask: ArrayLike,
  factor: ArrayLike | None = None,
  *,
  tolerance: float = 1e-6,
  max_steps: int = 50,
) -> LassoFit:
  """`lasso` at several penalties, f32[B, A] from large to small, each starting where the one before it ended.

  Returns:
    A `LassoFit` with a second axis A in every field.
  """
  factor = jnp.ones(jnp.shape(source_mask), jnp.float32) if factor is None else factor
  solve = functools.partial(_path, tolerance=tolerance, max_steps=max_steps)
  return jax.vmap(solve)(x, y, alphas, row_mask, source_mask, factor)


def _path(x, y, alphas, row_mask, source_mask, factor, *, tolerance, max_steps) -> LassoFit:
  """`lasso_path` for one problem: x [M, S], alphas [A]."""
  problem, shift = _prepare(x, y, row_mask, source_mask, factor)
  correlation = _matmul(_centre(problem, problem.y, 0.0), problem.x) / problem.rows
  largest = jnp.max(jnp.abs(correlation) / problem.factor, initial=0.0)
  constant = source_mask & jnp.all(problem.x == 0, axis=0)
  size = min(x.shape[1], max(32, x.shape[0] * 3 // 2))

  def solve(state, alpha):
    here = problem._replace(alpha=alpha)
    # With all weights at 0 the largest correlation says whether that is the solution.
    solved = (largest <= alpha) & jnp.all(state.weights == 0)
    state = state._replace(gap=jnp.where(solved, 0.0, jnp.inf), steps=jnp.int32(0))
    if size:
      state = jax.lax.while_loop(
        lambda state: (state.gap > tolerance) & (state.steps < max_steps),
        lambda state: _outer(here, state, size),
        state,
      )
    weights = state.weights
    fitted = _matmul(problem.x, weights) + _matmul(shift, weights)
    intercept = jnp.sum(jnp.where(row_mask, problem.y - fitted, 0.0)) / problem.rows
    return state, LassoFit(weights, intercept, state.gap, jnp.sum(weights != 0), constant, state.steps)

  start = _State(jnp.zeros_like(correlation), correlation, jnp.float32(0), largest, jnp.int32(0))
  return jax.lax.scan(solve, start, alphas)[1]


def _prepare(x, y, row_mask, source_mask, factor):
  """Clears padding and shifts each column by its first valid row; returns the shift too, f32[S]."""
  x = x.astype(jnp.float32)
  shift = jnp.where(source_mask, x[jnp.argmax(row_mask)], 0.0)
  x = jnp.where(row_mask[:, None] & source_mask, x - shift, 0.0)
  rows = jnp.maximum(jnp.sum(row_mask), 1).astype(jnp.float32)
  factor = jnp.where(source_mask, factor, 1.0)
  y = jnp.where(row_mask, y, 0.0).astype(jnp.float32)
  return _Problem(x, y, jnp.float32(0), factor, row_mask, jnp.sum(x, axis=0) / rows, rows), shift


def _outer(problem: _Problem, state: _State, size: int) -> _State:
  """Chooses a working set, solves it, and certifies the result."""
  alpha = jnp.maximum(problem.alpha, state.alpha * _DECAY)
  priority = jnp.where(state.weights != 0, jnp.inf, jnp.abs(state.correlation) / problem.factor)
  index = jax.lax.top_k(priority, size)[1]
  columns = problem.x[:, index]
  centred = jnp.where(problem.row_mask[:, None], columns - problem.mean[index], 0.0)
  working = _Set(_matmul(centred.T, centred) / problem.rows, problem.factor[index])
  chosen = _solve_set(working, state.correlation[index], state.weights[index], alpha)
  weights = jnp.zeros_like(state.weights).at[index].set(chosen)
  residual = _residual(problem, columns, chosen)
  correlation = _matmul(residual, problem.x) / problem.rows
  # One more Newton step, for the dual point only. Its product is small, so plain rounding does no harm.
  step = _newton_direction(working, correlation[index], chosen, alpha)
  gap = _gap(problem, weights, residual, residual - _matmul(centred, step))
  return _State(weights, correlation, gap, alpha, state.steps + 1)


def _solve_set(working: _Set, gradient, weights, alpha):
  """Minimises 1/2 w G w - q w + alpha sum factor |w| on the working set; `gradient` f32[K] is q - G w at `weights`."""

  def newton(carry):
    weights, gradient, _, count = carry
    return *_newton_step(working, gradient, weights, alpha), count + 1

  def sweep(carry):
    weights, gradient, _, count = carry
    weights, gradient = _coordinate_sweep(working, gradient, weights, alpha)
    # Newton steps go on until one is not cut short by a change of sign. Stopping earlier makes the next sweep bring
    # back what the last step has just removed, and progress crawls.
    weights, gradient, full, _ = jax.lax.while_loop(
      lambda carry: ~carry[2] & (carry[3] < _NEWTONS), newton, (weights, gradient, False, 0)
    )
    violation = jnp.max(jnp.where(weights != 0, 0.0, jnp.abs(gradient) / working.factor))
    return weights, gradient, full & (violation <= alpha * (1 + 1e-6)), count + 1

  return jax.lax.while_loop(
    lambda carry: ~carry[2] & (carry[3] < _ROUNDS), sweep, (weights, gradient, jnp.array(False), 0)
  )[0]


def _coordinate_sweep(working: _Set, gradient, weights, alpha):
  """Minimises over each weight in turn: w_j <- soft(g_j + G_jj w_j, alpha factor_j) / G_jj; constant sources stay 0."""
  diagonal = jnp.diagonal(working.gram)

  def update(j, carry):
    weights, gradient = carry
    pull = gradient[j] + diagonal[j] * weights[j]
    shrunk = jnp.sign(pull) * jnp.maximum(jnp.abs(pull) - alpha * working.factor[j], 0.0)
    new = jnp.where(diagonal[j] > 0, shrunk / jnp.where(diagonal[j] > 0, diagonal[j], 1.0), 0.0)
    return weights.at[j].set(new), gradient - working.gram[j] * (new - weights[j])

  return jax.lax.fori_loop(0, weights.shape[0], update, (weights, gradient))


def _newton_direction(working: _Set, gradient, weights, alpha):
  """Step to the minimum over the support with its signs held: (G_AA + ridge) d = g_A - alpha factor_A sign(w_A)."""
  active = weights != 0
  diagonal = jnp.where(active, _RIDGE * jnp.diagonal(working.gram), 1.0)
  gram = jnp.where(active[:, None] & active, working.gram, 0.0) + jnp.diag(diagonal)
  right = jnp.where(active, gradient - alpha * working.factor * jnp.sign(weights), 0.0)
  step = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(gram), True), right)
  # Should rounding still make the matrix indefinite, no step is taken and the sweeps go on by themselves.
  return jnp.where(active & jnp.all(jnp.isfinite(step)), step, 0.0)


def _newton_step(working: _Set, gradient, weights, alpha):
  """A Newton step, cut where the first weight reaches 0; says whether it was full. It never raises the objective."""
  direction = _newton_direction(working, gradient, weights, alpha)
  towards_zero = weights * direction < 0
  crossing = jnp.where(towards_zero, -weights / jnp.where(towards_zero, direction, 1.0), jnp.inf)
  length = jnp.minimum(jnp.min(crossing), 1.0)
  new = jnp.where(crossing <= length, 0.0, weights + length * direction)
  return new, gradient - _matmul(working.gram, new - weights), length >= 1.0


def _gap(problem: _Problem, weights, residual, dual_residual):
  """Duality gap over objective, at the dual point s r' / M with s <= 1 so chosen that |x^T r'| s / M <= alpha factor.

  P - D = |r - s r'|^2 / (2M) + sum_j (alpha factor_j |w_j| - s w_j x_j^T r' / M): a sum of terms that are not negative,
  so nothing cancels, whatever r' is.
  """
  correlation = _matmul(dual_residual, problem.x) / problem.rows
  largest = jnp.max(jnp.abs(correlation) / problem.factor)
  scale = jnp.minimum(1.0, problem.alpha / jnp.where(largest > 0, largest, 1.0))
  penalty = problem.alpha * problem.factor * jnp.abs(weights)
  difference = (residual - dual_residual) + (1 - scale) * dual_residual
  gap = jnp.sum(difference**2) / (2 * problem.rows) + jnp.sum(jnp.maximum(penalty - scale * weights * correlation, 0.0))
  objective = jnp.sum(residual**2) / (2 * problem.rows) + jnp.sum(penalty)
  return jnp.where(objective > 0, gap / jnp.where(objective > 0, objective, 1.0), 0.0)


def _residual(problem: _Problem, columns, weights):
  """Centred y - columns . weights, f32[M], in pairs of floats: exact to its own last digit for columns of 0 and ±1."""

  def subtract(carry, term):
    high, low = carry
    high, error = _two_sum(high, -term)
    return (high, low + error), None

  (high, low), _ = jax.lax.scan(subtract, (problem.y, jnp.zeros_like(problem.y)), (columns * weights).T)
  return _centre(problem, high, low)


def _centre(problem: _Problem, high, low):
  """Subtracts the mean over valid rows from high + low; a second pass removes what rounding left of it."""
  high, error = _two_sum(high, -_mean(problem, high))
  values = high + (error + low)
  return jnp.where(problem.row_mask, values - _mean(problem, values), 0.0)


def _mean(problem: _Problem, values):
  return jnp.sum(jnp.where(problem.row_mask, values, 0.0)) / problem.rows


def _two_sum(a, b):
  """Knuth: a + b as a rounded sum and its exact error."""
  total = a + b
  rest = total - a
  return total, (a - (total - rest)) + (b - rest)


def _matmul(a, b):
  return jnp.matmul(a, b, precision=_EXACT)


class Penalty(enum.StrEnum):
  """How `alpha` becomes the penalty of one problem.

  RAW: as it stands, on raw weights and targets (AttriMem, eq. 11).
  CONTEXT_CITE: columns standardised and the target divided by the answer's length L (ContextCite's code). On raw
    weights this is alpha L s_j with s_j the column's standard deviation: it grows with L, and true effects vanish on
    long answers.
  RELATIVE: a fraction of the smallest alpha at which every weight is 0, so that it means the same at every length and
    scale.
  HELD_OUT: of fractions between 1 and `alpha`, the one whose weights predict best the measurements that they were not
    fitted to (5 folds).
  """

  RAW = "raw"
  CONTEXT_CITE = "context_cite"
  RELATIVE = "relative"
  HELD_OUT = "held_out"


@dataclasses.dataclass(frozen=True)
class Problem:
  """One regression: x bool or f32[M, S], y f32[M], and the answer's length in tokens (for `context_cite`)."""

  x: np.ndarray
  y: np.ndarray
  length: int = 1


@dataclasses.dataclass(frozen=True)
class Fit:
  """`LassoFit` of one problem, as NumPy: weights f32[S], constant bool[S]. `alpha` is the penalty that was used."""

  weights: np.ndarray
  intercept: float
  gap: float
  constant: np.ndarray
  alpha: float


def largest_alpha(x: np.ndarray, y: np.ndarray) -> float:
  """The smallest penalty at which every weight is 0: max_j |x_j . (y - mean y)| / M."""
  if not x.size:
    return 0.0
  y = y.astype(np.float64)
  return float(np.max(np.abs((y - y.mean()) @ x)) / len(y))


def penalise(penalty: Penalty, alpha: float, problem: Problem) -> tuple[float, np.ndarray]:
  """The penalty of one problem and its factor f32[S] for each source; `HELD_OUT` must have become a fraction before."""
  ones = np.ones(problem.x.shape[1], np.float32)
  if penalty is Penalty.RAW:
    return alpha, ones
  if penalty is Penalty.CONTEXT_CITE:
    spread = problem.x.astype(np.float32).std(axis=0)
    return alpha * problem.length, np.where(spread > 0, spread, 1.0).astype(np.float32)
  # A constant target has largest_alpha 0; any positive penalty then gives the same zeros.
  return max(alpha * largest_alpha(problem.x, problem.y), float(np.finfo(np.float32).tiny)), ones


def fit(
  problems: Sequence[Problem], *, penalty: Penalty = Penalty.RAW, alpha: float = 0.01, tolerance: float = 1e-6
) -> list[Fit]:
  """Solves problems of any shapes, in order.

  Rows are padded to 8, 16, 32, ..., sources to 128, 512, 2048, ... and batches to 16 or 256, so compilations are
  bounded.

  Raises:
    ValueError: alpha is not positive; a problem without rows, with targets that are not finite or of another length.
  """
  _check(problems, alpha)
  fits: dict[int, Fit] = {}
  shapes = [(_bucket(len(problem.y), 8, 2), _bucket(problem.x.shape[1], 128, 4)) for problem in problems]
  for shape in sorted(set(shapes)):
    members = [i for i, other in enumerate(shapes) if other == shape]
    while members:
      size = _batch_size(len(members))
      part, members = members[:size], members[size:]
      solved = _fit_padded([problems[i] for i in part], shape, size, penalty, alpha, tolerance)
      fits.update(zip(part, solved, strict=True))
  return [fits[i] for i in range(len(problems))]


def _check(problems: Sequence[Problem], alpha: float) -> None:
  if not alpha > 0:
    raise ValueError(f"The LASSO penalty alpha is {alpha}; it must be greater than 0.")
  for i, problem in enumerate(problems):
    if problem.x.ndim != 2 or problem.y.shape != problem.x.shape[:1] or not len(problem.y):
      raise ValueError(
        f"LASSO problem {i}: x has shape {problem.x.shape}, y {problem.y.shape}; expected [M, S] and [M] with M >= 1."
      )
    if not np.all(np.isfinite(problem.y)):
      raise ValueError(
        f"LASSO problem {i}: {np.sum(~np.isfinite(problem.y))} of {len(problem.y)} targets are not finite."
      )


def _bucket(length: int, smallest: int, factor: int) -> int:
  """The first of smallest, smallest * factor, smallest * factor^2, ... that holds `length`."""
  while smallest < length:
    smallest *= factor
  return smallest


def _batch_size(count: int) -> int:
  """16 problems on a CPU (a batch waits for its slowest member, and 16 fit the cache), up to 256 elsewhere."""
  return 16 if count <= 16 or jax.default_backend() == "cpu" else 256


class _Padded(NamedTuple):
  """Problems stacked to one shape: x [B, M, S], y [B, M], row_mask [B, M], source_mask [B, S]."""

  x: np.ndarray
  y: np.ndarray
  row_mask: np.ndarray
  source_mask: np.ndarray


def _pad(problems: Sequence[Problem], shape: tuple[int, int], size: int) -> _Padded:
  rows, sources = shape
  masks = all(problem.x.dtype == bool for problem in problems)  # travel to the device as one byte each
  x, y = np.zeros((size, rows, sources), bool if masks else np.float32), np.zeros((size, rows), np.float32)
  row_mask, source_mask = np.zeros((size, rows), bool), np.zeros((size, sources), bool)
  for i, problem in enumerate(problems):
    m, s = problem.x.shape
    x[i, :m, :s], y[i, :m] = problem.x, problem.y
    row_mask[i, :m], source_mask[i, :s] = True, True
  return _Padded(x, y, row_mask, source_mask)


def _fit_padded(problems, shape, size, penalty, alpha, tolerance) -> list[Fit]:
  """Solves up to `size` problems as one batch of shape (M, S)."""
  padded = _pad(problems, shape, size)
  fractions = [alpha] * len(problems)
  if penalty is Penalty.HELD_OUT:
    fractions = _best_fractions(problems, padded, alpha)
  alphas, factors = np.ones(size, np.float32), np.ones((size, shape[1]), np.float32)
  for i, problem in enumerate(problems):
    alphas[i], factors[i, : problem.x.shape[1]] = penalise(penalty, fractions[i], problem)
  solved = jax.device_get(
    lasso(padded.x, padded.y, alphas, padded.row_mask, padded.source_mask, factors, tolerance=tolerance)
  )
  return [
    Fit(
      solved.weights[i, : problem.x.shape[1]],
      float(solved.intercept[i]),
      float(solved.gap[i]),
      solved.constant[i, : problem.x.shape[1]],
      float(alphas[i]),
    )
    for i, problem in enumerate(problems)
  ]


def _best_fractions(problems: Sequence[Problem], padded: _Padded, least: float) -> list[float]:
  """For each problem the fraction, of a path from 1 to `least`, with the smallest squared error on held-out rows.

  Of equal errors the largest penalty wins. Problems of one row have nothing to hold out and get `least`.
  """
  grid = np.geomspace(1.0, min(least, 1.0), _PATH)
  largest = np.array([largest_alpha(p.x, p.y) for p in problems] + [0.0] * (len(padded.y) - len(problems)))
  alphas = np.maximum(largest[:, None] * grid, np.finfo(np.float32).tiny).astype(np.float32)
  part = np.arange(padded.y.shape[1]) % _FOLDS
  errors = np.zeros(alphas.shape)
  for fold in range(_FOLDS):
    train = padded.row_mask & (part != fold)
    fits = jax.device_get(lasso_path(padded.x, padded.y, alphas, train, padded.source_mask, tolerance=1e-4))
    predicted = np.einsum("bms,bas->bam", padded.x.astype(np.float32), fits.weights) + fits.intercept[..., None]
    held = padded.row_mask & (part == fold)
    errors += np.sum(np.where(held[:, None], (predicted - padded.y[:, None]) ** 2, 0.0), axis=-1)
  best = grid[np.argmin(errors, axis=1)]
  return [float(best[i]) if len(p.y) > 1 else float(grid[-1]) for i, p in enumerate(problems)]
