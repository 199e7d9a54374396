"""Reads LongMemEval (Wu et al. 2024, xiaowu0162/longmemeval-cleaned) into episodes, each of one question.

The files oracle (evidence sessions only), S (some 48 sessions) and M (some 500) have one format: a JSON list, which is
read item by item; JSON lines and .xz do as well. Each irregularity is mended or kept by a stated rule and listed in a
`Report`. Dates are those of the file at hand: oracle and S date the same session differently.
"""

import enum
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrimem_jax.data import dates, reading
from attrimem_jax.data.reading import Log, Report
from attrimem_jax.types import Episode, History, Question, Session, Turn

KINDS = (
  "single-session-user",
  "single-session-assistant",
  "single-session-preference",  # its gold is a rubric for a judge, which no answer matches word by word
  "multi-session",
  "temporal-reasoning",
  "knowledge-update",
)
NOTES = False
ABSTENTION = "_abs"  # ends the ids of questions that the history does not answer; their kind does not say so
ROLES = ("user", "assistant")

_FORMAT = reading.Format("LongMemEval")
_CONTROL = dict.fromkeys([*range(9), *range(14, 32), 127]) | dict.fromkeys([11, 12, 13], "\n")


class Change(enum.StrEnum):
  """What the reader met that is not as it should be, and what it did."""

  NUMBER = "number as an answer, written as text"
  ABSTENTION = "question to abstain from, its explanation is no gold answer"
  NO_EVIDENCE = "question without a turn marked as evidence, kept"
  MISSING_SESSION = "answer session that is not in the haystack, left out"
  OUT_OF_ORDER = "haystack not in the order of its dates, sorted"
  AFTER_QUESTION = "haystack with sessions dated after the question, kept"
  REPEATED_SESSION = "session id that stands twice, the later one renamed"
  EMPTY_SESSION = "session without turns, left out"
  ASSISTANT_FIRST = "session that the assistant opens, kept"
  EMPTY_TURN = "turn without text, kept"
  TRIMMED = "blanks around a text, removed"
  CONTROL = "control characters in a text, removed or made a line break"
  ZERO_WIDTH = "zero-width characters in a question or answer, removed"
  REPEATED_QUESTION = "question text that stands twice, kept"


def read(path: str | pathlib.Path = "") -> tuple[tuple[Episode, ...], Report]:
  """Reads a LongMemEval file: one episode per question, named by its id, in the order of the file.

  Args:
    path: the JSON file (a list or one object a line, packed with xz or not); "" takes ATTRIMEM_DATA.

  Raises:
    ValueError: there is no such file, or it is not LongMemEval; the message names file and field.
  """
  file = _FORMAT.resolve(path)
  return parse(_FORMAT.items(file), str(file))


def parse(items: Iterable[Any], file: str) -> tuple[tuple[Episode, ...], Report]:
  """As `read`, of JSON that is loaded already; `file` is its name in messages and in the report."""
  log: Log = {}
  texts: dict[str, str] = {}
  episodes = []
  for index, item in enumerate(items):
    where = f"{file}[{index}]"
    episodes.append(_episode(_FORMAT.typed(item, dict, where), where, log, texts))
  if not episodes:
    raise _FORMAT.error(file, "it holds no question")
  _FORMAT.unique([episode.history.id for episode in episodes], "question_id", file)
  _check_repeats([question for episode in episodes for question in episode.questions], log)
  return tuple(episodes), reading.report(file, episodes, Change, log)


def _episode(item: Mapping[str, Any], where: str, log: Log, texts: dict[str, str]) -> Episode:
  name = _FORMAT.field(item, "question_id", str, where)
  if not name.strip():
    raise _FORMAT.error(f"{where}.question_id", "an id without text")
  asked = _date(_FORMAT.field(item, "question_date", str, where), f"{where}.question_date")
  sessions, gold = _haystack(item, name, where, log, texts)
  if any(session.date > asked for session in sessions):
    reading.note(log, Change.AFTER_QUESTION, name)
  _check_answer_sessions(item, name, where, log)
  kind = _FORMAT.field(item, "question_type", str, where)
  if kind not in KINDS:
    raise _FORMAT.error(f"{where}.question_type", f"type {kind!r} is none of {', '.join(KINDS)}")
  text = _clean(_FORMAT.field(item, "question", str, where), name, log)
  if not text:
    raise _FORMAT.error(f"{where}.question", "a question without text")
  if not gold:
    reading.note(log, Change.NO_EVIDENCE, name)
  question = Question(name, text, _answers(item, name, where, log), kind, gold, asked[:10])
  return Episode(History(name, sessions), (question,))


def _answers(item: Mapping[str, Any], name: str, where: str, log: Log) -> tuple[str, ...]:
  """The gold. A question to abstain from has none: its `answer` explains what the history lacks."""
  answer = item.get("answer")
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    reading.note(log, Change.NUMBER, name)
    text = _FORMAT.number(answer, f"{where}.answer")
  else:
    text = _clean(_FORMAT.field(item, "answer", str, where), name, log)
  if not text:
    raise _FORMAT.error(f"{where}.answer", "an answer without text")
  if name.endswith(ABSTENTION):
    reading.note(log, Change.ABSTENTION, name)
    return ()
  return (text,)


def _haystack(
  item: Mapping[str, Any], name: str, where: str, log: Log, texts: dict[str, str]
) -> tuple[tuple[Session, ...], tuple[str, ...]]:
  """The sessions in the order of their dates, and the ids of the turns that carry the answer."""
  keys = ("haystack_session_ids", "haystack_dates", "haystack_sessions")
  ids, days, talks = (_FORMAT.field(item, key, list, where) for key in keys)
  if not len(ids) == len(days) == len(talks):
    what = f"{len(ids)} ids, {len(days)} dates and {len(talks)} sessions, which should run parallel"
    raise _FORMAT.error(f"{where}.haystack_sessions", what)
  sessions: list[Session] = []
  gold: list[str] = []
  seen: dict[str, int] = {}
  for index, (raw, day, talk) in enumerate(zip(ids, days, talks, strict=True)):
    own = _FORMAT.typed(raw, str, f"{where}.{keys[0]}[{index}]")
    date = _date(_FORMAT.typed(day, str, f"{where}.{keys[1]}[{index}]"), f"{where}.{keys[1]}[{index}]")
    place = f"{where}.{keys[2]}[{index}]"
    seen[own] = seen.get(own, 0) + 1
    if seen[own] > 1:
      reading.note(log, Change.REPEATED_SESSION, f"{name}:{own}")
      own = f"{own}#{seen[own]}"
    turns, marked = _turns(_FORMAT.typed(talk, list, place), own, name, place, log, texts)
    gold += marked
    if turns:
      sessions.append(Session(own, date, turns))
    else:
      reading.note(log, Change.EMPTY_SESSION, f"{name}:{own}")
  if not sessions:
    raise _FORMAT.error(f"{where}.haystack_sessions", "the haystack has no turns")
  in_order = sorted(sessions, key=lambda session: session.date)
  if in_order != sessions:
    reading.note(log, Change.OUT_OF_ORDER, name)
  return tuple(in_order), tuple(gold)


def _turns(
  items: Sequence[Any], session: str, name: str, where: str, log: Log, texts: dict[str, str]
) -> tuple[tuple[Turn, ...], list[str]]:
  """Turns named "<session>:<number from 1>", and the names of those marked as evidence. Equal texts are held once."""
  turns: list[Turn] = []
  gold = []
  for index, item in enumerate(items):
    place = f"{where}[{index}]"
    raw = _FORMAT.typed(item, dict, place)
    role = _FORMAT.field(raw, "role", str, place)
    if role not in ROLES:
      raise _FORMAT.error(f"{place}.role", f"role {role!r} is none of {', '.join(ROLES)}")
    own = f"{session}:{index + 1}"
    text = _plain(_FORMAT.field(raw, "content", str, place), f"{name}:{own}", log)
    if not text:
      reading.note(log, Change.EMPTY_TURN, f"{name}:{own}")
    if _FORMAT.typed(raw.get("has_answer") or False, bool, f"{place}.has_answer"):
      gold.append(own)
    turns.append(Turn(role, texts.setdefault(text, text), own))
  if turns and turns[0].speaker == "assistant":
    reading.note(log, Change.ASSISTANT_FIRST, f"{name}:{session}")
  return tuple(turns), gold


def _check_answer_sessions(item: Mapping[str, Any], name: str, where: str, log: Log) -> None:
  for index, own in enumerate(_FORMAT.field(item, "answer_session_ids", list, where)):
    if _FORMAT.typed(own, str, f"{where}.answer_session_ids[{index}]") not in item["haystack_session_ids"]:
      reading.note(log, Change.MISSING_SESSION, f"{name}:{own}")


def _check_repeats(questions: Sequence[Question], log: Log) -> None:
  first: dict[str, Question] = {}
  for question in questions:
    if first.setdefault(question.text, question) is not question:
      reading.note(log, Change.REPEATED_QUESTION, question.id)


def _plain(text: str, place: str, log: Log) -> str:
  """Without control characters and outer blanks."""
  printed = text.translate(_CONTROL)
  if printed != text:
    reading.note(log, Change.CONTROL, place)
  if printed != printed.strip():
    reading.note(log, Change.TRIMMED, place)
  return printed.strip()


def _clean(text: str, name: str, log: Log) -> str:
  visible = reading.without_zero_width(text)
  if visible != text:
    reading.note(log, Change.ZERO_WIDTH, name)
  return _plain(visible, name, log)


def _date(text: str, where: str) -> str:
  try:
    return dates.parse_weekday(text)
  except ValueError as error:
    raise _FORMAT.error(where, str(error)) from error
