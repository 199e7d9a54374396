"""Forgetting in a bank: the least valuable records leave the current view, with the reason, until they are purged.

`select` ranks arrays and is all that costs time in a large bank; `retain` applies it to records. Core memory has a
budget of its own and is never forgotten here.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from attrimem_jax import checks
from attrimem_jax.memory.bank import Bank
from attrimem_jax.retention.factors import FACTORS, Known
from attrimem_jax.types import Module, Record


@dataclasses.dataclass(frozen=True)
class Forgotten:
  """Why a record was forgotten: its value, what each factor added to it, and the least value that was kept (NaN if
  none was)."""

  id: int
  value: float
  contributions: Mapping[str, float]
  threshold: float


@dataclasses.dataclass(frozen=True)
class Retained:
  """A bank after forgetting, and what was forgotten and can still be restored, in order of ids."""

  bank: Bank
  forgotten: tuple[Forgotten, ...] = ()


def select(values: np.ndarray, costs: np.ndarray | None, budget: int) -> np.ndarray:
  """Which memories to keep: the best first, each that still fits; of equal ones the earlier.

  Args:
    values: float [n].
    costs: int [n], what each takes of the budget, 1 or more; None counts memories.
    budget: 0 or more.

  Returns:
    bool [n].

  Raises:
    ValueError: a value is not finite, or the budget is negative.
  """
  checks.whole("budget", budget, 0)
  bad = np.flatnonzero(~np.isfinite(values))
  if bad.size:
    raise ValueError(f"the value of memory {bad[0]} is {values[bad[0]]}: mend its factors, NaN has no rank")
  keep = np.zeros(len(values), bool)
  order = np.argsort(-values, kind="stable")
  if costs is None:
    keep[order[:budget]] = True
    return keep
  left = budget
  while order.size:  # what stands before the first that does not fit is kept; then only what fits alone is looked at
    order = order[costs[order] <= left]
    total = np.cumsum(costs[order], dtype=np.int64)
    fits = int(np.searchsorted(total, left, side="right"))
    keep[order[:fits]] = True
    left -= int(total[fits - 1]) if fits else 0
    order = order[fits + 1 :]
  return keep


def known_records(
  records: tuple[Record, ...],
  age: np.ndarray,
  *,
  profile: str = "",
  retrieved: Mapping[int, int] | None = None,
  credit: Mapping[int, float] | None = None,
) -> Known:
  """What is known of a bank's records.

  A record speaks of the user whoever wrote it, so all are `by_user`; those of one date form a session. Each record
  that it replaced confirms it: reliability is 1 - 0.5^(1 + confirmations).

  Args:
    age: days, float [n].
    profile: of the user, mostly the core memory's text.
    retrieved, credit: by record id: how often it was read, and the summed attributions of its tokens.
  """
  retrieved, credit = retrieved or {}, credit or {}
  _, session = np.unique([record.date for record in records], return_inverse=True)
  return Known(
    texts=tuple(record.text for record in records),
    reliability=1 - 0.5 ** np.array([1 + len(record.supersedes) for record in records], np.float64),
    by_user=np.ones(len(records), bool),
    session=session,
    age=age,
    retrieved=np.array([retrieved.get(record.id, 0) for record in records], np.int64),
    credit=np.array([credit.get(record.id, 0.0) for record in records], np.float64),
    profile=profile,
  )


def candidates(bank: Bank) -> tuple[Record, ...]:
  """The records that can be forgotten: current ones outside of core memory, in order of their ids."""
  return tuple(record for record in bank.current() if record.module != Module.CORE)


def retain(held: Retained, factors: np.ndarray, weights: np.ndarray, budget: int, *, unit: str = "tokens") -> Retained:
  """Forgets the least valuable of `candidates(held.bank)` beyond the budget.

  Args:
    factors: float [n, 7], as `factors.blind` gives them for the candidates.
    weights: float [7], not negative.
    budget: what the candidates may take together: tokens, or records. With less than the smallest record takes,
      nothing is kept.
    unit: "tokens" or "records".

  Raises:
    ValueError: shapes do not match the candidates, a weight is negative, or a factor is not finite.
  """
  checks.choice("unit", unit, ("tokens", "records"))
  records = candidates(held.bank)
  if factors.shape != (len(records), len(FACTORS)):
    raise ValueError(
      f"factors have shape {factors.shape}: give {len(FACTORS)} for each of the {len(records)} candidates(held.bank)"
    )
  if weights.shape != (len(FACTORS),) or not (weights >= 0).all():
    raise ValueError(f"weights are {weights}: give {len(FACTORS)} numbers of at least 0, in the order of {FACTORS}")
  parts = factors * weights
  values = parts.sum(axis=1)
  costs = np.array([max(1, len(record.ids)) for record in records], np.int64)
  keep = select(values, costs if unit == "tokens" else None, budget)
  threshold = float(values[keep].min()) if keep.any() else float("nan")
  gone = tuple(
    Forgotten(records[i].id, float(values[i]), dict(zip(FACTORS, parts[i].tolist(), strict=True)), threshold)
    for i in np.flatnonzero(~keep)
  )
  bank = _with_current(held.bank, {f.id for f in gone}, current=False)
  return Retained(bank, tuple(sorted((*held.forgotten, *gone), key=lambda f: f.id)))


def restore(held: Retained, record_id: int) -> Retained:
  """Takes a forgotten record back into the current view.

  Raises:
    ValueError: the record was not forgotten, or it was purged.
  """
  _find(held, record_id)
  rest = tuple(f for f in held.forgotten if f.id != record_id)
  return Retained(_with_current(held.bank, {record_id}, current=True), rest)


def purge(held: Retained) -> Retained:
  """Deletes the text of all forgotten records for good; their numbers are never used again."""
  gone = {f.id for f in held.forgotten}
  return Retained(Bank(tuple(r for r in held.bank.records if r.id not in gone), held.bank.next_id))


def explain(held: Retained, record_id: int) -> str:
  """One sentence: the value, the value it would have needed, and the factors from the largest share down."""
  found = _find(held, record_id)
  parts = sorted(found.contributions.items(), key=lambda part: -part[1])
  shares = ", ".join(f"{name} {share:.3f}" for name, share in parts if share > 0) or "no factor above 0"
  return f"#{found.id} is worth {found.value:.3f}, the least kept record {found.threshold:.3f}: {shares}"


def _find(held: Retained, record_id: int) -> Forgotten:
  found = next((f for f in held.forgotten if f.id == record_id), None)
  if found is None:
    known = ", ".join(f"#{f.id}" for f in held.forgotten[:20]) or "none"
    raise ValueError(f"#{record_id} is not among the forgotten records that can be restored: these are {known}")
  return found


def _with_current(bank: Bank, ids: set[int], *, current: bool) -> Bank:
  if not ids:
    return bank
  return Bank(tuple(dataclasses.replace(r, current=current) if r.id in ids else r for r in bank.records), bank.next_id)
