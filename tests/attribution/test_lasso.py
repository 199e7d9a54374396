import warnings

import jax
import numpy as np
import pytest

from attrimem_jax.attribution.lasso import Fit, Penalty, Problem, fit, largest_alpha, lasso, lasso_path, penalise

sklearn_linear = pytest.importorskip("sklearn.linear_model")


def objective(problem: Problem, weights: np.ndarray, intercept: float, alpha: float, factor=1.0) -> float:
  x, y, weights = problem.x.astype(np.float64), problem.y.astype(np.float64), weights.astype(np.float64)
  return 0.5 * np.mean((y - intercept - x @ weights) ** 2) + alpha * np.sum(factor * np.abs(weights))


def oracle(problem: Problem, alpha: float) -> float:
  """The optimum, in float64. scikit-learn's warnings about tiny gaps say nothing about the result."""
  model = sklearn_linear.Lasso(alpha=alpha, tol=1e-10, max_iter=200_000)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model.fit(problem.x.astype(np.float64), problem.y.astype(np.float64))
  return objective(problem, model.coef_, model.intercept_, alpha)


def random_problem(rng, rows: tuple[int, int] = (8, 65), sources: float = 3000) -> Problem:
  M, S = int(rng.integers(*rows)), int(np.exp(rng.uniform(0, np.log(sources))))
  x, weights, count = rng.random((M, S)) < 0.5, np.zeros(S), min(int(rng.integers(6)), S)
  weights[rng.choice(S, count, replace=False)] = rng.choice([-1, 1], count) * rng.uniform(0.5, 4, count)
  y = x @ weights + rng.uniform(-9, 2) + rng.uniform(0.05, 2) * rng.standard_normal(M)
  return Problem(x, y.astype(np.float32))


def padded(problems, M: int, S: int, rng):
  """Stacks problems at random places of larger arrays whose other cells hold junk."""
  B = len(problems)
  x, y = rng.standard_normal((B, M, S)).astype(np.float32), rng.standard_normal((B, M)).astype(np.float32) * 99
  row_mask, source_mask = np.zeros((B, M), bool), np.zeros((B, S), bool)
  places = []
  for i, problem in enumerate(problems):
    m, s = problem.x.shape
    rows, sources = np.sort(rng.choice(M, m, replace=False)), np.sort(rng.choice(S, s, replace=False))
    x[i][np.ix_(rows, sources)], y[i][rows] = problem.x, problem.y
    row_mask[i, rows], source_mask[i, sources] = True, True
    places.append(sources)
  return x, y, row_mask, source_mask, places


def test_two_hundred_random_problems_reach_scikit_learns_objective_whatever_the_padding():
  rng = np.random.default_rng(0)
  problems = [random_problem(rng) for _ in range(200)]
  # From nearly everything zero to nearly M sources in use.
  alphas = [float(max(largest_alpha(p.x, p.y), 0.1) * 10 ** rng.uniform(-1.7, -0.05)) for p in problems]
  for start in range(0, 200, 20):
    part = problems[start : start + 20]
    x, y, row_mask, source_mask, places = padded(part, 64, 3072, rng)
    alpha = np.array(alphas[start : start + 20], np.float32)
    solved = jax.device_get(lasso(x, y, alpha, row_mask, source_mask))
    assert np.all(solved.gap <= 1e-6)
    assert np.all(solved.weights[~source_mask] == 0)
    for i, problem in enumerate(part):
      best = oracle(problem, float(alpha[i]))
      reached = objective(problem, solved.weights[i][places[i]], solved.intercept[i], float(alpha[i]))
      assert reached - best <= 1e-6 * best + 1e-12
      assert (reached - best) / reached <= solved.gap[i] + 2e-7, "the certificate bounds the true excess"


def test_published_penalty_with_more_sources_than_masks():
  """alpha = 0.01 on targets with a spread of several nats: nearly M sources in use, and poorly conditioned."""
  rng = np.random.default_rng(1)
  problems = [random_problem(rng, (9, 17), 400) for _ in range(8)]
  for problem, one in zip(problems, fit(problems, alpha=0.01), strict=True):
    best = oracle(problem, 0.01)
    assert objective(problem, one.weights, one.intercept, 0.01) - best <= 1e-6 * best
    assert one.gap <= 1e-6


def test_one_source_by_hand():
  # Centred: x = (-1/2, 1/2), y = (-1, 1). Correlation 1/2, variance 1/4, so w = (1/2 - alpha) / (1/4).
  one = fit([Problem(np.array([[False], [True]]), np.array([1.0, 3.0], np.float32))], alpha=0.1)[0]
  np.testing.assert_allclose(one.weights, [1.6], rtol=1e-6)
  np.testing.assert_allclose(one.intercept, 2 - 1.6 / 2, rtol=1e-6)


def test_two_orthogonal_sources_by_hand():
  x = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], bool)
  y = np.array([0.0, -1.0, 3.0, 2.0], np.float32)  # 3 x_1 - x_2; each w shrinks by alpha / (1/4)
  one = fit([Problem(x, y)], alpha=0.05)[0]
  np.testing.assert_allclose(one.weights, [2.8, -0.8], rtol=1e-6)


def same(a: Fit, weights, intercept) -> None:
  np.testing.assert_allclose(a.weights, weights, atol=1e-6)
  np.testing.assert_allclose(a.intercept, intercept, rtol=1e-6)
  assert 0 <= a.gap <= 1e-6


def test_degenerate_problems():
  rng = np.random.default_rng(2)
  masks, noise = rng.random((12, 5)) < 0.5, rng.standard_normal(12).astype(np.float32)
  constant_columns = masks.copy()
  constant_columns[:, 1], constant_columns[:, 3] = True, False
  nothing, one_row, flat, constant, silent = fit(
    [
      Problem(np.zeros((12, 0), bool), noise),
      Problem(masks[:1], noise[:1]),
      Problem(masks, np.full(12, 7.25, np.float32)),
      Problem(constant_columns, noise),
      Problem(masks, noise),
    ],
    alpha=0.01,
  )
  same(nothing, np.zeros(0), noise.mean())
  same(one_row, np.zeros(5), noise[0])
  same(flat, np.zeros(5), 7.25)
  assert list(constant.constant) == [False, True, False, True, False]
  assert constant.weights[1] == constant.weights[3] == 0
  assert not silent.constant.any()
  same(fit([Problem(masks, noise)], alpha=50.0)[0], np.zeros(5), noise.mean())


def test_duplicate_sources_share_one_effect():
  rng = np.random.default_rng(3)
  column = rng.random((16, 1)) < 0.5
  problem = Problem(np.repeat(column, 400, axis=1), (3.0 * column[:, 0] - 1).astype(np.float32))
  one = fit([problem], alpha=0.1)[0]
  best = oracle(problem, 0.1)
  assert objective(problem, one.weights, one.intercept, 0.1) - best <= 1e-6 * best
  assert np.all(one.weights >= 0)


def test_all_masks_of_three_tokens_repeated_many_times():
  """M = 8 has 256 different columns: of 500 sources many are duplicates or complements of others."""
  rng = np.random.default_rng(4)
  problem = Problem(rng.random((8, 500)) < 0.5, rng.standard_normal(8).astype(np.float32))
  for alpha in (0.003, 0.1):
    one, best = fit([problem], alpha=alpha)[0], oracle(problem, alpha)
    assert objective(problem, one.weights, one.intercept, alpha) - best <= 1e-6 * best


def test_weights_scale_with_the_target():
  rng = np.random.default_rng(5)
  problem = random_problem(rng, (16, 17), 300)
  large = Problem(problem.x, problem.y * 2.0**20)
  small, big = fit([problem], alpha=0.125)[0], fit([large], alpha=0.125 * 2.0**20)[0]
  np.testing.assert_allclose(big.weights / 2.0**20, small.weights, rtol=1e-4, atol=1e-6)


def test_real_columns_with_large_means():
  rng = np.random.default_rng(6)
  x = (1000 + rng.standard_normal((16, 8))).astype(np.float32)
  problem = Problem(x, (x[:, 3] - 0.5 * x[:, 7] + rng.standard_normal(16)).astype(np.float32))
  one, best = fit([problem], alpha=0.1)[0], oracle(problem, 0.1)
  centred = problem.y.astype(np.float64) - x.astype(np.float64) @ one.weights.astype(np.float64)
  assert objective(problem, one.weights, centred.mean(), 0.1) - best <= 1e-5 * best


def test_jit_changes_nothing():
  rng = np.random.default_rng(7)
  x, y, row_mask, source_mask, _ = padded([random_problem(rng, (8, 9), 4) for _ in range(2)], 8, 4, rng)
  alpha = np.full(2, 0.1, np.float32)
  compiled = lasso(x, y, alpha, row_mask, source_mask)
  with jax.disable_jit():
    plain = lasso(x, y, alpha, row_mask, source_mask)
  np.testing.assert_allclose(compiled.weights, plain.weights, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(compiled.intercept, plain.intercept, rtol=1e-5, atol=1e-6)


def test_order_of_results_and_bounded_compilations():
  rng = np.random.default_rng(8)
  problems = [random_problem(rng, (9, 17), 500) for _ in range(40)]
  together = fit(problems, alpha=0.2)
  before = lasso._cache_size()
  for problem, one in zip(problems[:5], together, strict=False):
    np.testing.assert_allclose(fit([problem], alpha=0.2)[0].weights, one.weights, atol=2e-5)
  assert lasso._cache_size() == before, "a single problem runs in the shape of a batch"


def test_context_cite_penalty_is_its_published_pipeline():
  """Standardised columns, target over L, alpha 0.01, then rescaled: as context-cite's solver does it."""
  rng = np.random.default_rng(9)
  problem = Problem(rng.random((16, 60)) < 0.5, rng.normal(-2, 3, 16).astype(np.float32), length=6)
  x = problem.x.astype(np.float64)
  model = sklearn_linear.Lasso(alpha=0.01, tol=1e-12, max_iter=100_000)
  model.fit((x - x.mean(0)) / x.std(0), problem.y.astype(np.float64) / 6)
  one = fit([problem], penalty=Penalty.CONTEXT_CITE, alpha=0.01)[0]
  np.testing.assert_allclose(one.weights, 6 * model.coef_ / x.std(0), atol=2e-4)


def test_relative_penalty_means_the_same_at_every_scale():
  rng = np.random.default_rng(10)
  problem = random_problem(rng, (16, 17), 100)
  largest = largest_alpha(problem.x, problem.y)
  assert np.all(fit([problem], alpha=largest * 1.001)[0].weights == 0)
  assert np.any(fit([problem], alpha=largest * 0.99)[0].weights != 0)
  alpha, factor = penalise(Penalty.RELATIVE, 0.1, problem)
  np.testing.assert_allclose(alpha, 0.1 * largest)
  assert np.all(factor == 1)
  longer = Problem(problem.x, problem.y * 50)
  first, second = (fit([p], penalty=Penalty.RELATIVE, alpha=0.1)[0] for p in (problem, longer))
  np.testing.assert_allclose(second.weights / 50, first.weights, rtol=1e-3, atol=1e-5)
  flat = Problem(problem.x, np.ones(16, np.float32))
  same(fit([flat], penalty=Penalty.RELATIVE, alpha=0.1)[0], np.zeros(problem.x.shape[1]), 1.0)


@pytest.mark.parametrize(
  ("problem", "alpha", "message"),
  [
    (Problem(np.zeros((4, 2), bool), np.zeros(4, np.float32)), 0.0, "alpha is 0.0"),
    (Problem(np.zeros((4, 2), bool), np.zeros(3, np.float32)), 0.1, r"\(4, 2\), y \(3,\)"),
    (Problem(np.zeros((0, 2), bool), np.zeros(0, np.float32)), 0.1, "M >= 1"),
    (Problem(np.zeros((4, 2), bool), np.array([0, np.inf, np.nan, 1], np.float32)), 0.1, "2 of 4 targets"),
  ],
)
def test_bad_problems(problem, alpha, message):
  with pytest.raises(ValueError, match=message):
    fit([problem], alpha=alpha)


def test_a_path_solves_each_penalty():
  rng = np.random.default_rng(5)
  problems = [random_problem(rng, sources=200) for _ in range(8)]
  x, y, row_mask, source_mask, _ = padded(problems, 64, 256, rng)
  largest = np.array([largest_alpha(p.x, p.y) for p in problems])
  alphas = (largest[:, None] * [1.2, 0.9, 0.3, 0.1, 0.03]).astype(np.float32)
  path = jax.device_get(lasso_path(x, y, alphas, row_mask, source_mask))
  assert path.weights.shape == (8, 5, 256)
  assert np.all(path.gap <= 1e-6)
  assert np.all(path.support[:, 0] == 0)
  for column in range(5):
    alone = jax.device_get(lasso(x, y, alphas[:, column], row_mask, source_mask))
    np.testing.assert_allclose(path.weights[:, column], alone.weights, atol=2e-3)
    np.testing.assert_allclose(path.intercept[:, column], alone.intercept, atol=5e-3)
  assert path.steps[:, 1:].mean() < np.mean([lasso(x, y, a, row_mask, source_mask).steps for a in alphas.T[1:]])


def test_held_out_measurements_choose_the_penalty_that_scikit_learn_chooses():
  rng = np.random.default_rng(6)
  model_selection = pytest.importorskip("sklearn.model_selection")
  chosen, expected = [], []
  for _ in range(6):
    problem = random_problem(rng, rows=(60, 65), sources=40)
    (got,) = fit([problem], penalty=Penalty.HELD_OUT, alpha=0.01)
    alphas = largest_alpha(problem.x, problem.y) * np.geomspace(1, 0.01, 12)
    folds = model_selection.PredefinedSplit(np.arange(len(problem.y)) % 5)
    oracle = sklearn_linear.LassoCV(alphas=alphas, cv=folds, tol=1e-8, max_iter=100_000)
    # LassoCV averages the folds' means, which differ in size by one row at most.
    oracle.fit(problem.x.astype(np.float64), problem.y.astype(np.float64))
    chosen.append(got.alpha)
    expected.append(oracle.alpha_)
  close = np.abs(np.log(np.array(chosen) / expected)) < 0.5  # one place of the path at most
  assert close.all(), list(zip(chosen, expected, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_held_out_with_few_measurements(rows):
  x = np.random.default_rng(0).random((rows, 4)) < 0.5
  (got,) = fit([Problem(x, np.arange(rows, dtype=np.float32))], penalty=Penalty.HELD_OUT, alpha=0.01)
  assert np.isfinite(got.weights).all()
