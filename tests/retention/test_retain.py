import numpy as np
import pytest

from attrimem_jax.memory.bank import Bank
from attrimem_jax.retention.factors import FACTORS, Lexical, blind
from attrimem_jax.retention.retain import (
  Retained,
  candidates,
  explain,
  known_records,
  purge,
  restore,
  retain,
  select,
)
from attrimem_jax.types import Module, Record


def _greedy(values, costs, budget):
  keep = [False] * len(values)
  for i in sorted(range(len(values)), key=lambda i: (-values[i], i)):
    if costs[i] <= budget:
      keep[i], budget = True, budget - costs[i]
  return keep


@pytest.mark.parametrize("seed", range(20))
def test_select_takes_the_best_that_still_fit(seed):
  rng = np.random.default_rng(seed)
  n = int(rng.integers(0, 40))
  values, costs = rng.integers(0, 6, n) / 2, rng.integers(1, 12, n)  # with ties
  for budget in (0, 1, 7, 60, 10_000):
    assert select(values, costs, budget).tolist() == _greedy(values, costs, budget)
    assert select(values, None, budget).tolist() == _greedy(values, np.ones(n, int), budget)


def test_select_refuses_what_has_no_rank():
  with pytest.raises(ValueError, match="memory 1 is nan"):
    select(np.array([1, np.nan]), None, 1)
  with pytest.raises(ValueError, match="budget"):
    select(np.array([1.0]), None, -1)


@pytest.fixture
def bank():
  texts = ("core profile", "one two", "three", "four five six", "old")
  modules = (Module.CORE, Module.EPISODIC, Module.SEMANTIC, Module.EPISODIC, Module.SEMANTIC)
  records = tuple(
    Record(i, module, text, tuple(range(len(text.split()))), "2024-01-01", current=i != 5)
    for i, (text, module) in enumerate(zip(texts, modules, strict=True), 1)
  )
  return Bank(records, 6)


def _factors(bank, **columns):
  table = np.zeros((len(candidates(bank)), 7))
  for name, values in columns.items():
    table[:, FACTORS.index(name)] = values
  return table


ONES = np.ones(7)


def test_the_least_valuable_records_go_and_can_be_explained_restored_and_purged(bank):
  held = retain(Retained(bank), _factors(bank, goal=[0.1, 0.9, 0.5], usage=[0.2, 0, 0]), ONES, 4)
  assert [r.id for r in held.bank.current()] == [1, 3, 4]  # core stays, #5 was past before
  (gone,) = held.forgotten
  assert (gone.id, gone.value, gone.threshold) == (2, pytest.approx(0.3), pytest.approx(0.5))
  assert sum(gone.contributions.values()) == pytest.approx(gone.value)
  assert explain(held, 2) == "#2 is worth 0.300, the least kept record 0.500: usage 0.200, goal 0.100"
  assert restore(held, 2) == Retained(bank)
  purged = purge(held)
  assert purged.bank.get(2) is None
  assert purged.bank.next_id == bank.next_id
  with pytest.raises(ValueError, match="#2 is not among"):
    restore(purged, 2)


def test_forgetting_twice_keeps_both_explanations(bank):
  once = retain(Retained(bank), _factors(bank, goal=[0.1, 0.9, 0.5]), ONES, 2, unit="records")
  twice = retain(once, _factors(once.bank, goal=[0.9, 0.5]), ONES, 1, unit="records")
  assert [f.id for f in twice.forgotten] == [2, 4]
  assert [r.id for r in twice.bank.current()] == [1, 3]


def test_a_budget_below_every_record_keeps_nothing_but_core(bank):
  held = retain(Retained(bank), _factors(bank), ONES, 0)
  assert [r.id for r in held.bank.current()] == [1]
  assert np.isnan(held.forgotten[0].threshold)
  assert retain(Retained(Bank.empty()), np.zeros((0, 7)), ONES, 5) == Retained(Bank.empty())


def test_factors_of_records_come_from_the_bank_and_its_logs(bank):
  records = candidates(bank)
  known = known_records(records, np.zeros(3), retrieved={3: 1}, credit={4: 1.0})
  table = blind(known, Lexical()).values
  np.testing.assert_allclose(table[:, FACTORS.index("usage")], [0, 0.5, 0])
  np.testing.assert_allclose(table[:, FACTORS.index("utility")], [0, 0, 0.5])
  np.testing.assert_allclose(table[:, FACTORS.index("reliability")], 0.5)


def test_bad_factors_and_weights_are_refused(bank):
  with pytest.raises(ValueError, match="candidates"):
    retain(Retained(bank), np.zeros((5, 7)), ONES, 4)
  with pytest.raises(ValueError, match="at least 0"):
    retain(Retained(bank), _factors(bank), -ONES, 4)
  with pytest.raises(ValueError, match="is nan"):
    retain(Retained(bank), _factors(bank, goal=[np.nan, 1, 1]), ONES, 4)
  with pytest.raises(ValueError, match="unit"):
    retain(Retained(bank), _factors(bank), ONES, 4, unit="bytes")
