"""The words and letters that the whole project shares.

Letters in shape comments and einsum strings:

| letter | meaning                     | letter | meaning                      |
|--------|-----------------------------|--------|------------------------------|
| B      | batch                       | P      | prefixes (shared prompts)    |
| n      | suffixes of one prefix      | G      | rollouts of one group        |
| T      | tokens                      | V      | vocabulary                   |
| D      | width of the residual       | L      | layers                       |
| N      | query heads                 | K      | key/value heads              |
| H      | head size                   | F      | width of the feed-forward    |
| M      | masks (ablations)           | S      | sources                      |

Everything here is immutable and knows nothing of files, clocks or networks. A `History` is what the policy may read. A
`Question` is what it may never read: the two meet only in an `Episode`, and writing memory takes a `History`.
"""

import dataclasses
import enum


class Module(enum.StrEnum):
  """The four kinds of memory; each has one prompt and one set of operations."""

  CORE = "core"
  EPISODIC = "episodic"
  SEMANTIC = "semantic"
  PROCEDURAL = "procedural"


class Finish(enum.StrEnum):
  """Why a completion ended: a stop token was sampled, or the length limit was hit."""

  STOP = "stop"
  LENGTH = "length"


@dataclasses.dataclass(frozen=True)
class Turn:
  """One utterance. `id` is unique within its history and is what evidence lists refer to."""

  speaker: str
  text: str
  id: str = ""


@dataclasses.dataclass(frozen=True)
class Session:
  """One sitting of a conversation. `date` is ISO-8601 local time without zone ("2023-05-08T13:56"), "" if unknown."""

  id: str
  date: str
  turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class History:
  """The sessions of one conversation, in time order: all that a policy may see while it writes."""

  id: str
  sessions: tuple[Session, ...]


@dataclasses.dataclass(frozen=True)
class Question:
  """Asked after the history. `answers` holds every accepted gold answer; none where the right answer is to abstain.

  `evidence` holds the ids of the turns that carry the answer, `date` the day on which the question is asked.
  """

  id: str
  text: str
  answers: tuple[str, ...]
  kind: str
  evidence: tuple[str, ...] = ()
  date: str = ""

  @property
  def abstain(self) -> bool:
    return not self.answers


@dataclasses.dataclass(frozen=True)
class Note:
  """A memory that a reference writer (oracle teacher, annotators) would keep of one session."""

  session: int
  module: Module
  text: str


@dataclasses.dataclass(frozen=True)
class Episode:
  """A history with the questions asked about it, and reference notes where the data set has them."""

  history: History
  questions: tuple[Question, ...]
  notes: tuple[Note, ...] = ()


@dataclasses.dataclass(frozen=True)
class CallKey:
  """Which policy call wrote something: (history, rollout, session index, module)."""

  history: str
  rollout: int
  session: int
  module: Module


@dataclasses.dataclass(frozen=True)
class Record:
  """One memory entry.

  Attributes:
    id: number shown as `#id`; unique within its bank and never used again.
    module: the kind of memory it belongs to.
    text: what it says (a view of `ids`, stripped).
    ids: the writer's own token ids, never re-encoded.
    date: the date of the session that it speaks of ("" if unknown).
    owner: the call that wrote it, or None for a record that no call of this rollout wrote (a given bank).
    start: position of `ids[0]` in the owner's completion.
    supersedes: ids of the records that this one replaced.
    current: False once it has been replaced or deleted; such records stay in the bank as its past.
  """

  id: int
  module: Module
  text: str
  ids: tuple[int, ...]
  date: str = ""
  owner: CallKey | None = None
  start: int = 0
  supersedes: tuple[int, ...] = ()
  current: bool = True
