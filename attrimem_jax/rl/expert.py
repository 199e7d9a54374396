"""Reads the expert trajectories that MemBuilder records (agent_calls.jsonl) as actions of this project's grammar.

A line of that file is one call: a session's messages, the module ("agent_type") and what the expert did. With a text
at `actions`, as `rl.prompted` writes it, its lines are taken as they stand. MemBuilder's own form at `expert_output`
differs from the grammar, and every difference is counted in the report:

- an old record is quoted there and named by its number here: it is found by its text; one that is not current (there
  old versions stay and can be quoted again) becomes an ADD of the new text;
- core memory is one text there, of which a call records the whole as it is afterwards, and a record per line here: the
  change is found by comparing lines, and where lines went or moved the whole is written again as one record;
- what the bank refuses (a repetition, for instance) is left out, as is an operation that cannot be read.

All modules of a session see the memory before it, in both.
"""

import dataclasses
import difflib
import enum
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrimem_jax.data import dates
from attrimem_jax.data.reading import Log, note
from attrimem_jax.memory.actions import Op, Reason, parse, render
from attrimem_jax.memory.bank import Bank, apply_all
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import CallKey, Finish, History, Module, Session, Turn

FILE = "agent_calls.jsonl"
_LABEL = re.compile(r"^\s*\[(?:CORE|EPISODIC|SEMANTIC|PROCEDURAL)\]\s*", re.IGNORECASE)


class Change(enum.StrEnum):
  """What was not taken over as it stood."""

  LINE = "line that is no call, left out"
  NO_OUTPUT = "call without an output, or one that failed, left out"
  UNREADABLE = "operation that cannot be read, left out"
  OLD_RECORD = "change of a record that is not current, added as a new one"
  CORE = "core memory whose lines went or moved, written again as one record"
  REFUSED = "action that the bank refuses, left out"
  DATE = "session date that cannot be read, left empty"


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """A history, and for each of its sessions the module, the bank before the session and the completion of each call."""

  history: History
  calls: tuple[tuple[tuple[Module, Bank, list[int]], ...], ...]


def read(path: str | os.PathLike[str], chat: Chat) -> tuple[list[Trajectory], str]:
  """Reads one file, or all files called agent_calls.jsonl below a folder.

  Args:
    path: the file or folder.
    chat: of the policy that shall learn: completions are ids of its tokenizer, with the stop token.

  Returns:
    One trajectory per conversation, in order of their ids, and a report for people of all that was changed.

  Raises:
    ValueError: there is no such file, or it holds no call.
  """
  place = pathlib.Path(os.path.expanduser(path))
  files = sorted(place.rglob(FILE)) if place.is_dir() else [place]
  log: Log = {}
  calls: dict[str, dict[int, dict[Module, Mapping[str, Any]]]] = {}
  for file in files:
    if not file.is_file():
      raise ValueError(f"there are no expert trajectories at {str(place)!r}: give a folder or file {FILE}")
    for where, conversation, session, module, call in _calls(file, log):
      if module in calls.setdefault(conversation, {}).setdefault(session, {}):
        note(log, Change.LINE, where)  # a session that was tried twice counts once
      else:
        calls[conversation][session][module] = call
  if not calls:
    raise ValueError(f"{str(place)!r} holds no call of an expert: give a folder or file {FILE}")
  trajectories = [_trajectory(name, sessions, chat, log) for name, sessions in sorted(calls.items())]
  actions = [line for t in trajectories for here in t.calls for _, _, ids in here for line in _lines(ids, chat)]
  head = f"{place}: {len(trajectories)} conversations, {sum(len(t.calls) for t in trajectories)} sessions, "
  counts = ", ".join(f"{op} {sum(line.split(' ')[0] == op for line in actions)}" for op in Op)
  lines = [f"{head}{len(actions)} actions ({counts})"]
  for change in Change:
    if change in log:
      lines.append(f"  {len(log[change]):4d}  {change}: {', '.join(log[change][:5])}{' …' if log[change][5:] else ''}")
  return trajectories, "\n".join(lines)


def _lines(ids: Sequence[int], chat: Chat) -> list[str]:
  return [line for line in chat.tokenizer.decode(list(ids)[:-1]).split("\n") if line]


def _calls(file: pathlib.Path, log: Log) -> Iterator[tuple[str, str, int, Module, Mapping[str, Any]]]:
  """(where, conversation, session, module, call) of every line that is one."""
  for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
    if not line.strip():
      continue
    where = f"{file.parent.name}/{file.name}:{number}"
    try:
      call = json.loads(line)
      key = str(call["conversation_id"]), int(call["session_index"]), Module(call["agent_type"])
    except (ValueError, KeyError, TypeError):
      note(log, Change.LINE, where)
      continue
    yield where, *key, call


def _trajectory(
  name: str, sessions: Mapping[int, Mapping[Module, Mapping[str, Any]]], chat: Chat, log: Log
) -> Trajectory:
  bank = Bank.empty()
  block: list[str] = []
  read_sessions, done = [], []
  for number, index in enumerate(sorted(sessions)):
    where = f"{name}/{index}"
    session = _session(where, index, next(iter(sessions[index].values())), log)
    before, here = bank, []
    for module in Module:
      call = sessions[index].get(module)
      output = _output(call)
      if output is None:
        note(log, Change.NO_OUTPUT, f"{where}/{module}")
        continue
      owner = CallKey(name, 0, number, module)
      writer = Writer(chat, bank, module, session.date, owner, f"{where}/{module}", log)
      if isinstance(output, str):
        writer.actions(output)
      elif module == Module.CORE:
        block = writer.core(str(output.get("new_core_memory") or output.get("content") or ""), block)
      else:
        writer.operations(output.get("operations"))
      bank = writer.bank
      here.append((module, before, writer.completion()))
    read_sessions.append(session)
    done.append(tuple(here))
  return Trajectory(History(name, tuple(read_sessions)), tuple(done))


def _output(call: Any) -> Mapping[str, Any] | str | None:
  if isinstance(call, Mapping) and isinstance(call.get("actions"), str):
    return call["actions"]
  output = call.get("expert_output") if isinstance(call, Mapping) else None
  if not isinstance(output, Mapping) or str(output.get("operation", "")).upper() == "ERROR":
    return None
  return output


def _session(where: str, index: int, call: Mapping[str, Any], log: Log) -> Session:
  given = call.get("input")
  new = given.get("new_session") if isinstance(given, Mapping) else None
  new = new if isinstance(new, Mapping) else {}
  messages = new.get("messages")
  spoken = [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
  turns = tuple(
    Turn(str(m.get("role", "user")), " ".join(str(m.get("content", "")).split()), f"{index}:{i}")
    for i, m in enumerate(spoken, 1)
  )
  stamp = str(new.get("timestamp") or "")
  date = _date(stamp)
  if stamp and not date:
    note(log, Change.DATE, where)
  return Session(str(index), date, turns)


def _date(stamp: str) -> str:
  """A date in a form of the benchmarks that experts were run on, as ISO-8601; "" for any other words."""
  for form in (dates.parse_weekday, dates.parse):
    try:
      return form(stamp)
    except ValueError:
      pass
  return dates.loose(stamp)


def _plain(text: Any) -> str:
  """A record's text on one line, without the label of its module."""
  return " ".join(_LABEL.sub("", text).split()) if isinstance(text, str) else ""


class Writer:
  """Writes the lines of one call and applies each as soon as it is written, so that numbers are known.

  Attributes:
    bank: as it is after the lines so far.
    lines: those that the bank has taken.
  """

  def __init__(
    self,
    chat: Chat,
    bank: Bank,
    module: Module,
    date: str,
    owner: CallKey,
    where: str,
    log: Log,
    core_budget: int | None = None,
  ):
    self.bank, self._chat, self._module, self._date, self._owner = bank, chat, module, date, owner
    self._where, self._log, self._core_budget = where, log, core_budget
    self.lines: list[str] = []

  def completion(self) -> list[int]:
    nothing = "SKIP" if self._module in (Module.SEMANTIC, Module.PROCEDURAL) else ""
    return self._chat.completion("\n".join(self.lines) or nothing)

  def actions(self, text: str) -> None:
    """Lines of this project's grammar."""
    for line in text.split("\n"):
      if line.strip() and line.strip() != Op.SKIP:
        self._line(line.strip())

  def operations(self, operations: Any) -> None:
    """Actions of the modules that keep records."""
    for operation in operations if isinstance(operations, list) else []:
      op, old, text = _read(operation)
      if op == Op.SKIP:
        continue
      if op is None or not text:
        note(self._log, Change.UNREADABLE, self._where)
        continue
      targets = list(dict.fromkeys(n for n in map(self._number, old) if n is not None))
      if op != Op.ADD and len(targets) < len(old):
        note(self._log, Change.OLD_RECORD, self._where)
      if not targets:
        self._write(Op.ADD, (), text)
      else:
        self._write(
          Op.MERGE if op == Op.MERGE and len(targets) > 1 else Op.UPDATE, targets[: None if op == Op.MERGE else 1], text
        )

  def core(self, text: str, block: Sequence[str]) -> list[str]:
    """Turns the block of core memory, one record a line in `block`, into `text`; returns its lines as they are now."""
    lines = [line for part in text.split("\n") if (line := _plain(part))]
    for size in range(len(lines), 1, -1):  # what was written again as one record is still its beginning
      if block and " ".join(lines[:size]) == block[0]:
        lines = [block[0], *lines[size:]]
        break
    changes = [c for c in difflib.SequenceMatcher(None, block, lines, autojunk=False).get_opcodes() if c[0] != "equal"]
    kept_in_place = all(
      j2 - j1 >= i2 - i1 and (j2 - j1 == i2 - i1 or i2 == len(block)) for _, i1, i2, j1, j2 in changes
    )
    if not lines or not kept_in_place:
      if lines:
        note(self._log, Change.CORE, self._where)
        lines = [" ".join(lines)]
        self._write(Op.REWRITE, (), lines[0])
    else:
      for _, i1, i2, j1, j2 in changes:
        for at, line in enumerate(lines[j1:j2]):
          number = self._number(block[i1 + at]) if i1 + at < i2 else None
          self._write(Op.APPEND if number is None else Op.REPLACE, () if number is None else (number,), line)
    return [line for line in lines or block if self._number(line) is not None]

  def _number(self, text: Any) -> int | None:
    """The number of the current record of this module that says `text`."""
    wanted = _plain(text).casefold()
    return next((r.id for r in reversed(self.bank.current(self._module)) if r.text.casefold() == wanted), None)

  def _write(self, op: Op, targets: Sequence[int], text: str) -> None:
    self._line(render(op, targets, text))

  def _line(self, line: str) -> None:
    actions = parse(self._chat.completion(line), self._chat.tokenizer, self._module, Finish.STOP)
    bank, done = apply_all(
      self.bank, actions, module=self._module, date=self._date, owner=self._owner, core_budget=self._core_budget
    )
    if [action.reason for action in done] == [Reason.OK]:
      self.bank = bank
      self.lines.append(line)
    else:
      note(self._log, Change.REFUSED, self._where)


def _read(operation: Any) -> tuple[Op | None, list[Any], str]:
  """(operation, quoted old records, new text) of an object or of a compact list; (None, [], "") where it is neither."""
  if isinstance(operation, list) and operation:
    name, *rest = operation
    fields = {"ADD": ("memory",), "UPDATE": ("old_memory", "new_memory"), "MERGE": ("old_memories", "new_memory")}
    operation = {"action": name, **dict(zip(fields.get(str(name).upper(), ()), rest, strict=False))}
  if not isinstance(operation, Mapping):
    return None, [], ""
  name = str(operation.get("action", "")).upper()
  if name == "SKIP":
    return Op.SKIP, [], ""
  if name == "ADD":
    return Op.ADD, [], _plain(operation.get("memory"))
  if name == "UPDATE":
    return Op.UPDATE, [operation.get("old_memory")], _plain(operation.get("new_memory"))
  if name == "MERGE":
    old = operation.get("old_memories")
    return Op.MERGE, old if isinstance(old, list) else [], _plain(operation.get("new_memory"))
  return None, [], ""
