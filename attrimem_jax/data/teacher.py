"""A writer that knows the notes of an episode: what it does, perfect or careless, and the memory that is left."""

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from attrimem_jax.data import chatter, world
from attrimem_jax.data.world import ATTRIBUTES
from attrimem_jax.types import Episode, Module, Record

_WRITES = {Module.CORE: ("APPEND", "REPLACE")}
_WRITES_ELSEWHERE = ("ADD", "UPDATE")
_MAY_SKIP = (Module.SEMANTIC, Module.PROCEDURAL)


class Memory(Protocol):
  """What the teacher needs of a bank."""

  def current(self, module: Module | None = None) -> Iterable[Record]: ...


@dataclasses.dataclass(frozen=True)
class Sloppiness:
  """How a teacher errs. Each is a probability: `miss` a fact, keep a line of `chatter`, `blur` the value of a fact."""

  miss: float = 0.0
  chatter: float = 0.0
  blur: float = 0.0

  def __post_init__(self) -> None:
    for name, share in dataclasses.asdict(self).items():
      if not 0.0 <= share <= 1.0:
        raise ValueError(f"Sloppiness.{name} is {share}: give a probability between 0 and 1")


PERFECT = Sloppiness()


def teacher_actions(
  episode: Episode,
  session: int,
  module: Module,
  bank: Memory,
  *,
  sloppiness: Sloppiness = PERFECT,
  rng: np.random.Generator | None = None,
) -> str:
  """Returns the completion of one call, one action a line.

  A note that changes what `bank` holds replaces that record; one that is news is added; one that is held is left out.
  Nothing to write is "SKIP", or "" for the modules that have no such operation.
  A careless writer may write a line twice (two blurred events look alike), which a bank refuses as a duplicate.

  Args:
    episode: as made by `synthetic.episode`.
    session: index of the session that is read.
    module: whose call it is.
    bank: the memory before the call.
    sloppiness: how often to err.
    rng: needed unless sloppiness is all zero.

  Raises:
    ValueError: if `rng` is missing though it is needed.
  """
  if rng is None:
    if sloppiness != PERFECT:
      raise ValueError(f"teacher_actions got {sloppiness} and no rng: pass a numpy Generator")
    rng = np.random.default_rng(0)
  held = [(record.id, record.text) for record in bank.current(module)]
  texts = _kept_notes(episode, session, module, sloppiness, rng)
  texts += _kept_chatter(episode, session, module, sloppiness, rng)
  lines = [line for text in texts if (line := _action(text, module, held))]
  return "\n".join(lines) or ("SKIP" if module in _MAY_SKIP else "")


def _kept_notes(
  episode: Episode, session: int, module: Module, sloppiness: Sloppiness, rng: np.random.Generator
) -> list[str]:
  kept = []
  for note in episode.notes:
    if (note.session, note.module) == (session, module) and rng.random() >= sloppiness.miss:
      kept.append(_blurred(note.text) if rng.random() < sloppiness.blur else note.text)
  return kept


def _blurred(text: str) -> str:
  fact = world.read_record(text)
  assert fact is not None, f"not a note of the synthetic world: {text!r}"
  return world.vague_text(fact)


def _kept_chatter(
  episode: Episode, session: int, module: Module, sloppiness: Sloppiness, rng: np.random.Generator
) -> list[str]:
  turns = episode.history.sessions[session].turns
  user = turns[0].speaker
  notes = [note for turn in turns if turn.speaker == user and (note := chatter.careless_note(turn.text, user))]
  return [text for kind, text in notes if kind == module and rng.random() < sloppiness.chatter]


def _action(text: str, module: Module, held: list[tuple[int, str]]) -> str:
  """Returns the action that brings `text` into memory, or "" if it is there already."""
  if any(text == other for _, other in held):
    return ""
  add, replace = _WRITES.get(module, _WRITES_ELSEWHERE)
  topic = world.read_topic(text)
  if topic is not None and ATTRIBUTES[topic[1]].event is None:
    earlier = [number for number, other in held if world.read_topic(other) == topic]
    if earlier:
      return f"{replace} #{earlier[-1]} {text}"
  return f"{add} {text}"


def gold_records(episode: Episode, *, keep_old: bool = False) -> list[tuple[Module, str, str]]:
  """Returns the memory of a perfect writer as (module, text, date of the session), oldest first.

  With `keep_old` the replaced versions of states that changed are there too, at their earlier dates.
  """
  dates = [session.date for session in episode.history.sessions]
  last = {world.read_topic(note.text): i for i, note in enumerate(episode.notes)}
  records = []
  for i, note in enumerate(episode.notes):
    topic = world.read_topic(note.text)
    assert topic is not None, f"not a note of the synthetic world: {note.text!r}"
    if keep_old or ATTRIBUTES[topic[1]].event is not None or last[topic] == i:
      records.append((note.module, note.text, dates[note.session]))
  return records
