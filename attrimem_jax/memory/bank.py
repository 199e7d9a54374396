"""The bank: an immutable set of records, and `apply`, which turns (bank, action) into (bank, action with its outcome).

A record is never edited and never leaves the bank: what UPDATE, MERGE, REPLACE, REWRITE or DELETE retires stays as its
past with `current=False`, and what replaced it says so in `supersedes`. Applying the same action twice equals once.
"""

import bisect
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterable, Sequence

from attrimem_jax.memory.actions import OPERATIONS, Action, Op, Reason, parse, render
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey, Finish, Module, Note, Record


@dataclasses.dataclass(frozen=True)
class Bank:
  """Records in order of their ids (which is the order of writing), current and past; `next_id` is the next number."""

  records: tuple[Record, ...]
  next_id: int

  @classmethod
  def empty(cls) -> "Bank":
    return cls((), 1)

  def current(self, module: Module | None = None) -> tuple[Record, ...]:
    """The records that hold now, of one module or of all, in order of their ids."""
    return tuple(r for r in self.records if r.current and (module is None or r.module == module))

  def get(self, record_id: int) -> Record | None:
    """The record with this id, current or past, or None."""
    at = bisect.bisect_left(self.records, record_id, key=lambda r: r.id)
    return self.records[at] if at < len(self.records) and self.records[at].id == record_id else None

  def tokens(self, module: Module) -> int:
    """How many tokens the current records of a module hold: what the core budget counts."""
    return sum(len(r.ids) for r in self.records if r.current and r.module == module)


def apply(
  bank: Bank, action: Action, *, module: Module, date: str, owner: CallKey | None, core_budget: int | None = None
) -> tuple[Bank, Action]:
  """Applies one action.

  Args:
    bank: left as it is.
    action: what `parse` read; one that is already rejected changes nothing.
    module: the module that the call wrote for.
    date: the date of the session that the call read ("" if unknown).
    owner: the call, so that each token of a record can be traced to the step that sampled it.
    core_budget: the most tokens that the current core records may hold together; None for no limit.

  Returns:
    The new bank (the same object if nothing changed) and the action with its final reason.
  """
  if action.reason != Reason.OK or action.op is None or action.op == Op.SKIP:
    return bank, action
  assert action.op in OPERATIONS[module], f"{action.op} is no operation of {module}"
  targets = bank.current(module) if action.op == Op.REWRITE else tuple(map(bank.get, action.targets))
  reason = _refusal(bank, action, module, targets)
  if reason == Reason.OK and action.op != Op.DELETE and _over_budget(bank, action, module, targets, core_budget):
    reason = Reason.OVER_BUDGET
  if reason != Reason.OK:
    return bank, dataclasses.replace(action, reason=reason)
  retired = frozenset(r.id for r in targets if r is not None)
  start = 0 if owner is None else action.start
  record = Record(bank.next_id, module, action.text, action.ids, date, owner, start, tuple(sorted(retired)))
  return _write(bank, retired, None if action.op == Op.DELETE else record), action


def apply_all(
  bank: Bank,
  actions: Iterable[Action],
  *,
  module: Module,
  date: str,
  owner: CallKey | None,
  core_budget: int | None = None,
) -> tuple[Bank, tuple[Action, ...]]:
  """Applies the actions of one call in order; a rejected one does not stop the rest."""
  done = []
  for action in actions:
    bank, action = apply(bank, action, module=module, date=date, owner=owner, core_budget=core_budget)
    done.append(action)
  return bank, tuple(done)


def _write(bank: Bank, retired: frozenset[int], record: Record | None) -> Bank:
  records = bank.records
  if retired:
    records = tuple(dataclasses.replace(r, current=False) if r.id in retired else r for r in records)
  return Bank(records, bank.next_id) if record is None else Bank((*records, record), record.id + 1)


def _refusal(bank: Bank, action: Action, module: Module, targets: Sequence[Record | None]) -> Reason:
  """OK, or why the bank does not take the action; `targets` are the records that it would retire."""
  if any(r is None or r.module != module for r in targets):
    return Reason.UNKNOWN_ID
  known = [r for r in targets if r is not None]
  if not all(r.current for r in known):
    return _stale(bank, action, known)
  if action.op == Op.DELETE:
    return Reason.OK
  text = _normal(action.text)
  if len(known) == 1 and _normal(known[0].text) == text:
    return Reason.UNCHANGED
  retired = {r.id for r in known}
  same = (r.id for r in bank.records if r.current and r.module == module and _normal(r.text) == text)
  return Reason.DUPLICATE if any(i not in retired for i in same) else Reason.OK


def _stale(bank: Bank, action: Action, targets: Sequence[Record]) -> Reason:
  """For targets that no longer are all current: was this very change already made, or another one?"""
  heirs = {heir.id: heir for target in targets for heir in _heirs(bank, target)}
  if action.op == Op.DELETE:
    return Reason.SUPERSEDED if heirs else Reason.UNCHANGED
  if len(heirs) == 1 and all(_normal(r.text) == _normal(action.text) for r in heirs.values()):
    return Reason.UNCHANGED
  return Reason.SUPERSEDED


def _heirs(bank: Bank, record: Record) -> tuple[Record, ...]:
  """The current records that descend from `record` (itself, if it is current)."""
  line = {record.id}
  for other in bank.records[bisect.bisect_right(bank.records, record.id, key=lambda r: r.id) :]:
    if line.intersection(other.supersedes):  # what supersedes is younger, so one pass in order finds all
      line.add(other.id)
  return tuple(r for r in bank.records if r.id in line and r.current)


def _over_budget(
  bank: Bank, action: Action, module: Module, targets: Sequence[Record | None], budget: int | None
) -> bool:
  if module != Module.CORE or budget is None:
    return False
  before = bank.tokens(module)
  after = before - sum(len(r.ids) for r in targets if r is not None) + len(action.ids)
  # A given bank can be over the budget already: an action that makes it smaller is taken.
  return after > budget and after >= before


@functools.lru_cache(maxsize=1 << 16)
def _normal(text: str) -> str:
  """What two texts have in common if they are duplicates: the words, whatever their case and spacing."""
  return " ".join(text.casefold().split())


def from_notes(notes: Sequence[Note], dates: Sequence[str], tokenizer: Tokenizer) -> Bank:
  """A given bank: one record per note, written by no call; repeated notes are kept once.

  A note becomes the ids that a policy would have written for it, because it is read through the grammar's own line.

  Args:
    notes: in any order; records come in order of their sessions.
    dates: the date of each session.
    tokenizer: the policy's tokenizer.

  Raises:
    ValueError: a note is empty or names a session without a date entry.
  """
  bank = Bank.empty()
  for note in sorted(notes, key=lambda n: n.session):
    if not 0 <= note.session < len(dates):
      raise ValueError(f"note {note.text!r} names session {note.session}, but there are {len(dates)}: pass every date")
    op = OPERATIONS[note.module][0]
    actions = parse(tokenizer.encode(render(op, text=note.text)), tokenizer, note.module, Finish.STOP)
    if len(actions) != 1 or actions[0].reason != Reason.OK:
      raise ValueError(f"note {note.text!r} of session {note.session} is no record: give it a text")
    bank, _ = apply(bank, actions[0], module=note.module, date=dates[note.session], owner=None)
  return bank


def to_json(bank: Bank) -> str:
  """The bank as JSON text; `from_json` gives an equal bank back."""
  return json.dumps(dataclasses.asdict(bank), ensure_ascii=False)


def from_json(text: str) -> Bank:
  """Reads what `to_json` wrote.

  Raises:
    ValueError: the text is no bank, or its records are not in order of their ids.
  """
  try:
    fields = json.loads(text)
    bank = Bank(tuple(map(_record, fields["records"])), int(fields["next_id"]))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"this text is no memory bank ({error}): pass what to_json wrote") from error
  ids = [r.id for r in bank.records]
  if any(a >= b for a, b in itertools.pairwise([*ids, bank.next_id])):
    raise ValueError(f"a bank's record ids must grow and stay below next_id={bank.next_id}, got {ids[:20]}")
  return bank


def _record(fields: dict) -> Record:
  owner = fields["owner"]
  return Record(
    **fields
    | {
      "module": Module(fields["module"]),
      "ids": tuple(fields["ids"]),
      "owner": None if owner is None else CallKey(**owner | {"module": Module(owner["module"])}),
      "supersedes": tuple(fields["supersedes"]),
    }
  )
