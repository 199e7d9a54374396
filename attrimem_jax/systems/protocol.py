"""What a memory system is: it writes a history without knowing any question, and then retrieves passages for each.

    system.write(history) -> memory          memory.retrieve(questions) -> passages, best first; memory.cost

The answer model, its budget and the scores are the same for all systems, so that a comparison is of memories alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from attrimem_jax.types import History, Question


@dataclasses.dataclass(frozen=True)
class Passage:
  """What the answer model may read of a memory.

  Attributes:
    text: of one or more lines.
    date: ISO-8601, "" if unknown; the day is shown before the text.
    place: passages are shown in this order, which should be that of time.
  """

  text: str
  date: str = ""
  place: int = 0


@dataclasses.dataclass(frozen=True)
class Cost:
  """Calls of a language model and their tokens, counted as a caller pays for them: whole prompts, shared or not."""

  calls: int = 0
  read: int = 0
  written: int = 0

  def __add__(self, other: "Cost") -> "Cost":
    return Cost(self.calls + other.calls, self.read + other.read, self.written + other.written)

  @property
  def tokens(self) -> int:
    return self.read + self.written


NO_CALLS = Cost()


class Memory(Protocol):
  """What a system has kept of one history. `cost` is of writing it, and of all that retrieval has called since."""

  @property
  def cost(self) -> Cost: ...

  def retrieve(self, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    """The passages for each question, best first: where they exceed the answer model's budget the last ones go."""
    ...


class System(Protocol):
  """A way to keep memories.

  Attributes:
    name: as in `eval.system`.
    whole: passages may fill the answer model's whole window, and not only `answer.max_context`.
    sees_evidence: it is told which turns carry the answer; such a system is a bound, not a competitor.
  """

  @property
  def name(self) -> str: ...
  @property
  def whole(self) -> bool: ...
  @property
  def sees_evidence(self) -> bool: ...

  def write(self, history: History, number: int) -> Memory:
    """Reads a history; `number` is its place in the data, which seeds whatever is drawn."""
    ...


def blinded(question: Question, sees_evidence: bool = False) -> Question:
  """The question as a system may see it: its words and its day. Gold, kind and id (which may tell of abstention) go."""
  return Question("", question.text, (), "", question.evidence if sees_evidence else (), question.date)
