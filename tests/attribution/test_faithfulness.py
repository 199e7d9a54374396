import numpy as np
import pytest

from attrimem_jax.attribution.faithfulness import lds, r2, without_top


def test_rank_correlation_by_hand():
  # Ranks 1 2 3 against 1 3 2: 1 - 6 (0 + 1 + 1) / (3 · 8) = 1/2.
  assert lds(np.array([0.1, 5.0, 6.0]), np.array([-3.0, 0.0, -1.0])) == pytest.approx(0.5)


def test_rank_correlation_against_scipy_with_ties():
  stats = pytest.importorskip("scipy.stats")
  rng = np.random.default_rng(0)
  for _ in range(50):
    x, y = rng.integers(0, 6, 20), rng.integers(0, 4, 20) + rng.integers(0, 2, 20) * 0.5
    assert lds(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


def test_rank_correlation_sees_order_alone():
  x = np.random.default_rng(1).standard_normal(30)
  assert lds(x, np.exp(3 * x)) == pytest.approx(1)
  assert lds(x, -(x**3)) == pytest.approx(-1)


@pytest.mark.parametrize("measure", [lds, r2])
@pytest.mark.parametrize("values", [[], [2.0], [3.0, 3.0, 3.0]])
def test_nothing_to_tell_apart(measure, values):
  values = np.array(values)
  assert measure(np.arange(len(values)), values) == 0
  assert lds(values, np.arange(len(values))) == 0


def test_explained_variance_by_hand():
  actual = np.array([1.0, 2.0, 3.0])
  assert r2(actual, actual) == 1
  assert r2(np.full(3, 2.0), actual) == 0
  assert r2(np.array([1.0, 2.0, 4.0]), actual) == pytest.approx(0.5)
  assert r2(-actual, actual) < 0


def test_top_sources_by_hand():
  masks = without_top(np.array([0.5, 2.0, -1.0, 2.0]), (0, 1, 2, 3, 99))
  expected = [[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
  np.testing.assert_array_equal(masks, np.array(expected, bool))
  assert without_top(np.zeros(0), (1, 2)).shape == (2, 0)
