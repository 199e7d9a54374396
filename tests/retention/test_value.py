import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from attrimem_jax.retention.value import Cases, budgets, hill_climb, kept, pair_loss, pairwise


def _brute(values, gold, budget):
  """Sorts, cuts, counts."""
  order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:budget]
  return sum(place in order for place in gold) / len(gold)


def test_kept_equals_sorting_and_counting():
  rng = np.random.default_rng(0)
  tables = [rng.integers(0, 4, (n, 2)).astype(np.float32) for n in (1, 2, 7, 30, 30)]  # few values: many ties
  gold = [sorted(rng.choice(len(t), min(len(t), 1 + i), replace=False).tolist()) for i, t in enumerate(tables)]
  cases = Cases.pack(tables, gold)
  for keep in (0.1, 0.3, 1.0):
    budget = budgets(cases.size, keep)
    got = kept(*map(jnp.asarray, (cases.factors.sum(axis=-1), cases.size, cases.gold, budget)))
    expected = [_brute(t.sum(axis=1), g, max(1, int(keep * len(t) + 1e-9))) for t, g in zip(tables, gold, strict=True)]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_padding_below_zero_values_takes_no_place():
  cases = Cases.pack([np.full((2, 1), -1.0), np.zeros((9, 1))], [[1], [0]])
  got = kept(*map(jnp.asarray, (cases.factors[..., 0], cases.size, cases.gold, np.array([2, 1]))))
  np.testing.assert_array_equal(got, [1, 1])


def test_budgets_are_whole_and_at_least_one():
  np.testing.assert_array_equal(budgets(np.array([1, 3, 10, 500]), 0.3), [1, 1, 3, 150])
  with pytest.raises(ValueError, match="fraction"):
    budgets(np.array([3]), 0)


def _confounder(rng, cases):
  """Gold is plain, useful and reliable, but distractors are newer, louder and closer to the user (FACTORS order)."""
  tables, gold = [], []
  for _ in range(cases):
    good, bad = rng.uniform(0.7, 1, (20, 7)), rng.uniform(0, 0.3, (20, 7))
    low = rng.uniform(0.1, 0.4, (20, 7))
    valence, arousal = np.abs(rng.uniform(-0.9, 0.9, 20)), rng.uniform(0.5, 1, 20)
    calls = np.where(np.arange(20) < 4, rng.integers(0, 2, 20), rng.integers(0, 5, 20))
    wanted = np.column_stack([low[:, 0] * 0.1, good[:, 1], low[:, 2], low[:, 3], good[:, 4], good[:, 5], good[:, 6]])
    lure = np.column_stack([valence * arousal, bad[:, 1], good[:, 2], good[:, 3], bad[:, 4], bad[:, 5], bad[:, 6]])
    table = np.where((np.arange(20) < 4)[:, None], wanted, lure)
    table[:, 6] = calls / (1 + calls)
    order = rng.permutation(20)
    tables.append(table[order].astype(np.float32))
    gold.append(np.flatnonzero(order < 4).tolist())
  return Cases.pack(tables, gold)


def test_learned_weights_see_through_a_confounder_that_misleads_equal_weights():
  cases = _confounder(np.random.default_rng(1), 120)
  fit = np.arange(120) < 60
  (weights,), (ranked,) = hill_climb(cases, fit[None], 0.4), pairwise(cases, fit[None])
  assert (weights >= 0).all()
  assert (ranked >= 0).all()
  budget = budgets(cases.size, 0.4)

  def unseen(w):
    return np.asarray(kept(*map(jnp.asarray, (cases.factors @ w, cases.size, cases.gold, budget))))[~fit].mean()

  assert unseen(weights) == 1.0
  assert unseen(ranked) == 1.0
  assert 0.4 < unseen(np.ones(7, np.float32)) < 0.95
  for misleading in (0, 2, 3):
    assert unseen(np.eye(7, dtype=np.float32)[misleading]) < 0.1


def test_climbing_never_loses_on_what_it_fits_and_sees_nothing_else():
  rng = np.random.default_rng(3)
  tables = [rng.random((20, 3), np.float32) for _ in range(12)]
  gold = [[int(i)] for i in rng.integers(0, 20, 12)]
  fit = np.arange(12) < 6
  first = hill_climb(Cases.pack(tables, gold), fit[None], 0.2, live=(0, 2))
  other = [[(g[0] + 7) % 20] if i >= 6 else g for i, g in enumerate(gold)]
  np.testing.assert_array_equal(first, hill_climb(Cases.pack(tables, other), fit[None], 0.2, live=(0, 2)))
  assert first[0, 1] == 0

  def score(w):
    return np.mean([_brute(tables[i] @ w, gold[i], 4) for i in range(6)])

  assert score(first[0]) >= score(np.array([1, 0, 1], np.float32))


def test_ranking_finds_the_least_loss_of_a_plain_loop():
  """Against pairs one by one in float64, minimised by SciPy's L-BFGS-B within the same bounds."""
  rng = np.random.default_rng(4)
  tables, gold = [], []
  for size in (5, 9, 14, 7, 11, 6):
    table = rng.random((size, 3))
    table[0] += [0.25, -0.6, 0.05]  # the second factor misleads: its weight ends at the bound
    tables.append(table.astype(np.float32))
    gold.append([0, 2])
  cases = Cases.pack(tables, gold)
  fit = np.array([[True, True, True, True, False, True], [True] * 6])

  def loss(weights, chosen):
    total = 0.0
    for i in chosen:
      values = tables[i].astype(np.float64) @ weights
      others = [j for j in range(len(values)) if j not in gold[i]]
      total += np.mean([np.logaddexp(0, values[j] - values[g]) for g in gold[i] for j in others])
    return total / len(chosen)

  found = pairwise(cases, fit, penalty=1e-3, iterations=600)
  for weights, mask in zip(found, fit, strict=True):
    chosen = np.flatnonzero(mask)
    share = (mask / mask.sum()).astype(np.float32)
    ours = float(pair_loss(*map(jnp.asarray, (weights, cases.factors, cases.size, cases.gold, share))))
    np.testing.assert_allclose(ours, loss(weights.astype(np.float64), chosen), rtol=1e-5)
    best = minimize(lambda w, c=chosen: loss(w, c) + 1e-3 * w @ w, np.ones(3), bounds=[(0, None)] * 3)
    np.testing.assert_allclose(weights, best.x, atol=0.02)
    assert best.x[1] == 0
  live = pairwise(cases, fit[:1], live=(0,), iterations=50)[0]
  assert live[0] > 0
  assert not live[1:].any()


@pytest.mark.parametrize(
  ("tables", "gold", "match"),
  [
    ([], [], "no cases"),
    ([np.ones((2, 1))], [[]], "gold"),
    ([np.ones((2, 1))], [[2]], "gold"),
    ([np.array([[1.0], [np.nan]])], [[0]], "not finite"),
  ],
)
def test_cases_that_cannot_be_scored_are_refused(tables, gold, match):
  with pytest.raises(ValueError, match=match):
    Cases.pack(tables, gold)


def test_a_run_without_cases_is_refused():
  with pytest.raises(ValueError, match="no case to fit"):
    hill_climb(Cases.pack([np.ones((2, 1))], [[0]]), np.zeros((1, 1), bool), 0.3)
