"""Results of a benchmark run: files of conversations read back, scores over the whole data set, and costs.

Every score has two intervals: over conversations, whose questions stand or fall together, and over single questions.
With fewer than some ten conversations the first cannot be trusted, and with two it is only the two of them.
"""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from attrimem_jax import checks
from attrimem_jax.evaluation import benchmark
from attrimem_jax.evaluation.bootstrap import Interval, difference_interval, mean_interval
from attrimem_jax.reward import outcome
from attrimem_jax.systems.protocol import Cost, Passage
from attrimem_jax.types import Episode


@dataclasses.dataclass(frozen=True)
class Asked:
  """One question with its answer (None: the model gave none), its tokens, and those of passages left out."""

  id: str
  answer: str | None
  read: int
  written: int
  left_out: int


@dataclasses.dataclass(frozen=True)
class Conversation:
  """One conversation of a run, as its file holds it. `ranks` has one list for all questions, or one for each."""

  history: str
  system: str
  whole: bool
  cost: Cost
  seconds: Mapping[str, float]
  passages: tuple[Passage, ...]
  ranks: tuple[tuple[int, ...], ...]
  answers: tuple[Asked, ...]

  def retrieved(self) -> list[tuple[Passage, ...]]:
    """The passages for each question, best first."""
    ranks = self.ranks * len(self.answers) if len(self.ranks) == 1 else self.ranks
    return [tuple(self.passages[i] for i in rank) for rank in ranks]


def read_conversation(path: pathlib.Path, episode: Episode, fingerprint: str) -> Conversation:
  """Reads one file of a run.

  Raises:
    ValueError: it cannot be read, is of another conversation, or its answers are not those of the episode; the message
      names file and field.
  """
  item = _object(path)

  def field(name: str, kind: type | tuple[type, ...]) -> Any:
    return _field(item, name, kind, path, name)

  if field("fingerprint", str) != fingerprint:
    raise _error(path, "fingerprint", "is of another conversation, or the data have changed since")
  passages = [_passage(row, path, f"passages[{i}]") for i, row in enumerate(field("passages", list))]
  answers = tuple(_asked(row, path, f"answers[{i}]") for i, row in enumerate(field("answers", list)))
  if [a.id for a in answers] != [q.id for q in episode.questions]:
    raise _error(path, "answers", "are not to the questions of this conversation, in their order")
  ranks = tuple(_rank(row, len(passages), path, f"retrieved[{i}]") for i, row in enumerate(field("retrieved", list)))
  if len(ranks) not in (1, len(answers)):
    raise _error(path, "retrieved", f"has {len(ranks)} lists for {len(answers)} questions")
  cost = field("cost", dict)
  counts = [_count(cost.get(name), path, f"cost.{name}") for name in ("calls", "read", "written")]
  seconds = field("seconds", dict)
  times = {name: _real(seconds.get(name), path, f"seconds.{name}") for name in ("write", "retrieve", "answer")}
  name, whole = field("system", str), field("whole", bool)
  return Conversation(episode.history.id, name, whole, Cost(*counts), times, tuple(passages), ranks, answers)


def summarise(
  episodes: Sequence[Episode],
  answers: Mapping[str, str],
  conversations: Sequence[Conversation],
  name: str,
  *,
  samples: int,
  confidence: float,
) -> dict[str, Any]:
  """Scores by every measure that is defined, and costs where conversations were asked (not for given answers)."""
  measures = list(outcome.KINDS)
  if name == "locomo" and importlib.util.find_spec("nltk") is not None:
    measures.insert(0, benchmark.OFFICIAL)
  scored = {m: benchmark.score(episodes, answers, m, samples=samples, confidence=confidence) for m in measures}
  first = scored[measures[0]]
  content: dict[str, Any] = {
    "conversations": len(episodes),
    "questions": sum(first.counts.values()),
    "counts": dict(first.counts),
    "missing": list(first.missing),
    "clusters": {question.id: e.history.id for e in episodes for question in e.questions},
    "measures": {m: rows_of(score, samples, confidence) for m, score in scored.items()},
  }
  return content | ({"cost": costs(conversations)} if conversations else {})


def costs(conversations: Sequence[Conversation]) -> dict[str, float]:
  """Tokens and calls in all, and what a question costs with the writing of its memory shared among its questions."""
  written = sum((c.cost for c in conversations), Cost())
  answers = [a for c in conversations for a in c.answers]
  asked = Cost(len(answers), sum(a.read for a in answers), sum(a.written for a in answers))
  count, seconds = len(answers), {n: sum(c.seconds[n] for c in conversations) for n in ("write", "retrieve", "answer")}
  return {
    "write_calls": written.calls,
    "write_tokens": written.tokens,
    "answer_calls": asked.calls,
    "answer_read": asked.read,
    "answer_written": asked.written,
    "tokens_per_question": (written.tokens + asked.tokens) / count,
    "answer_tokens_per_question": asked.tokens / count,
    "left_out_per_question": sum(a.left_out for a in answers) / count,
    "seconds_write_per_conversation": seconds["write"] / len(conversations),
    "seconds_per_question": (seconds["retrieve"] + seconds["answer"]) / count,
  }


def paired(a: Mapping[str, Any], b: Mapping[str, Any], measure: str, *, by: str = "conversation") -> Interval | None:
  """Score of run `a` minus that of `b` on the same questions (contents of results.json); None if they differ."""
  mine, theirs = (run["measures"].get(measure, {}).get("scores") for run in (a, b))
  if not mine or not theirs or mine.keys() != theirs.keys():
    return None
  names = list(mine)
  clusters = [a["clusters"][name] for name in names] if by == "conversation" else None
  return difference_interval([mine[n] for n in names], [theirs[n] for n in names], clusters=clusters)


def rows_of(score: benchmark.Score, samples: int, confidence: float) -> dict[str, Any]:
  """A score as results.json holds it: mean and interval of each part, and the score of each question."""
  by_question = mean_interval(list(score.scores.values()), samples=samples, confidence=confidence)
  parts = {"overall": score.overall, "answerable": score.answerable, "abstention": score.abstention}
  rows: dict[str, Any] = {name: _triple(interval) for name, interval in parts.items()}
  rows |= {"overall_by_question": _triple(by_question)}
  return rows | {"kinds": {k: _triple(v) for k, v in score.kinds.items()}, "scores": dict(score.scores)}


def _triple(interval: Interval) -> list[float]:
  return [interval.mean, interval.low, interval.high]


def _object(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    item = json.loads(path.read_bytes())
  except OSError as error:
    raise ValueError(f"{path} cannot be read ({error.strerror})") from None
  except (ValueError, RecursionError) as error:
    raise _error(path, "file", f"is broken or cut JSON ({error})") from None
  if not isinstance(item, dict):
    raise _error(path, "file", f"is {checks.shown(item)}, not an object")
  return item


def _field(item: Mapping[str, Any], name: str, kind: type | tuple[type, ...], path: pathlib.Path, where: str) -> Any:
  value = item.get(name)
  kinds = kind if isinstance(kind, tuple) else (kind,)
  if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
    what = "is missing" if name not in item else f"is {checks.shown(value)}"
    raise _error(path, where, f"{what}, expected {' or '.join(k.__name__ for k in kinds)}")
  return value


def _passage(row: Any, path: pathlib.Path, where: str) -> Passage:
  if not isinstance(row, list) or [type(part) for part in row] != [str, str, int]:
    raise _error(path, where, f"is {checks.shown(row)}, expected [text, date, place]")
  return Passage(*row)


def _asked(row: Any, path: pathlib.Path, where: str) -> Asked:
  if not isinstance(row, dict):
    raise _error(path, where, f"is {checks.shown(row)}, expected an object")
  name = _field(row, "id", str, path, f"{where}.id")
  answer = _field(row, "answer", (str, type(None)), path, f"{where}.answer")
  return Asked(name, answer, *(_count(row.get(n), path, f"{where}.{n}") for n in ("read", "written", "left_out")))


def _rank(row: Any, most: int, path: pathlib.Path, where: str) -> tuple[int, ...]:
  if not isinstance(row, list) or not all(type(i) is int and 0 <= i < most for i in row):
    raise _error(path, where, f"is {checks.shown(row)}, expected places in the {most} passages")
  return tuple(row)


def _count(value: Any, path: pathlib.Path, where: str) -> int:
  if type(value) is not int or value < 0:
    raise _error(path, where, f"is {checks.shown(value)}, expected a count")
  return value


def _real(value: Any, path: pathlib.Path, where: str) -> float:
  if type(value) not in (int, float) or not 0 <= value < 1e12:
    raise _error(path, where, f"is {checks.shown(value)}, expected seconds")
  return float(value)


def _error(path: pathlib.Path, where: str, what: str) -> ValueError:
  return ValueError(f"{path}: {where} {what}: bring it back, or remove the file to ask this conversation again")
