"""Systems that keep the conversation as it is and call no model: retrieval, whole or newest text, evidence, nothing."""

import dataclasses
from collections.abc import Sequence

from attrimem_jax.memory.retrieval import Retriever
from attrimem_jax.systems.protocol import NO_CALLS, Cost, Passage
from attrimem_jax.types import History, Module, Question, Record, Session, Turn


def utterances(history: History) -> tuple[Passage, ...]:
  """One passage a turn; those without text are left out."""
  turns = [(session.date, turn) for session in history.sessions for turn in session.turns if turn.text.strip()]
  return tuple(Passage(_said(turn), date, place) for place, (date, turn) in enumerate(turns))


def sessions(history: History) -> tuple[Passage, ...]:
  """One passage a session."""
  return tuple(Passage(_whole(session), session.date, place) for place, session in enumerate(history.sessions))


@dataclasses.dataclass(frozen=True)
class Ranked:
  """Passages that a retriever ranks for each question."""

  passages: tuple[Passage, ...]
  retriever: Retriever
  cost: Cost = NO_CALLS

  def retrieve(self, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    records = [Record(p.place, Module.EPISODIC, p.text, (), p.date) for p in self.passages]
    found = self.retriever.rank_many([question.text for question in questions], records)
    return [tuple(self.passages[i] for i in ranked) for ranked in found]


@dataclasses.dataclass(frozen=True)
class Fixed:
  """The same passages whatever is asked."""

  passages: tuple[Passage, ...]
  cost: Cost = NO_CALLS

  def retrieve(self, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    return [self.passages for _ in questions]


@dataclasses.dataclass(frozen=True)
class Told:
  """The turns that each question names as its evidence."""

  passages: dict[str, Passage]
  cost: Cost = NO_CALLS

  def retrieve(self, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    return [tuple(self.passages[i] for i in dict.fromkeys(q.evidence) if i in self.passages) for q in questions]


@dataclasses.dataclass(frozen=True)
class Rag:
  """Retrieval over whole sessions or single utterances."""

  name: str
  retriever: Retriever
  by_session: bool
  whole: bool = False
  sees_evidence: bool = False

  def write(self, history: History, number: int) -> Ranked:
    return Ranked(sessions(history) if self.by_session else utterances(history), self.retriever)


@dataclasses.dataclass(frozen=True)
class Newest:
  """The newest turns that fit: all that the answer model can read (`whole`), or a window as large as others' budget."""

  name: str
  whole: bool
  sees_evidence: bool = False

  def write(self, history: History, number: int) -> Fixed:
    return Fixed(utterances(history)[::-1])


@dataclasses.dataclass(frozen=True)
class Oracle:
  """The evidence that the data set names: what perfect retrieval would find."""

  name: str = "oracle"
  whole: bool = False
  sees_evidence: bool = True

  def write(self, history: History, number: int) -> Told:
    turns = [(session.date, turn) for session in history.sessions for turn in session.turns]
    return Told({turn.id: Passage(_said(turn), date, place) for place, (date, turn) in enumerate(turns)})


@dataclasses.dataclass(frozen=True)
class Nothing:
  """No memory: what the answer model says by itself."""

  name: str = "none"
  whole: bool = False
  sees_evidence: bool = False

  def write(self, history: History, number: int) -> Fixed:
    return Fixed(())


def _said(turn: Turn) -> str:
  return f"{turn.speaker}: {turn.text}" if turn.speaker else turn.text


def _whole(session: Session) -> str:
  return "\n".join(_said(turn) for turn in session.turns if turn.text.strip())
