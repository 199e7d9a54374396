"""Reads PerLTQA (Du et al. 2024, Elvin-Yiming-Du/PerLTQA, en_v2) into episodes, one per protagonist.

A history starts with two sessions without date, the profile (a turn per entry) and the relationships (a turn per
person). Events (a turn each) and dialogues follow in the order of their dates; what has no date that can be read stands
before what has one. An event's own words for its date stay in its text. Each irregularity is mended or kept by a stated
rule and listed in a `Report`. `Memory Anchors` are left out: they are positions in the Chinese source. The memory was
rewritten in v2 and not all questions were, so some cannot be answered; they are kept, and nothing in the file tells
which.
"""

import ast
import enum
import html
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrimem_jax.data import dates, reading
from attrimem_jax.data.reading import Log, Report
from attrimem_jax.types import Episode, History, Question, Session, Turn

KINDS = ("profile", "social_relationship", "events", "dialogues")
NOTES = False

_FORMAT = reading.Format("PerLTQA")
_MEMORY, _QUESTIONS = "perltmem", "perltqa"  # in the names of the two files


class Change(enum.StrEnum):
  """What the reader met that is not as it should be, and what it did."""

  NO_QUESTIONS = "protagonist without questions, left out"
  MISSING_PART = "protagonist without a part of the memory, kept"
  UNDATED = "event or dialogue without a date that can be read, put before the dated ones"
  TWO_DATES = "dialogue with several dates, a session for each"
  EMPTY_TALK = "date of a dialogue without turns, left out"
  NO_SPEAKER = "line of a dialogue without a speaker, kept"
  EMPTY_TURN = "entry without text, left out"
  LIST = "list as a text, joined by commas"
  NUMBER = "number as a text, written as text"
  ENTITY = "HTML entity in a text, decoded"
  ZERO_WIDTH = "zero-width characters in a question or answer, removed"
  TRIMMED = "blanks around a text, removed"
  UNREADABLE_REFERENCE = "reference that is no list of ids, replaced by the entry the question stands under"
  DANGLING_REFERENCE = "reference to a memory that does not exist, left out"
  NO_EVIDENCE = "question without a reference that exists, kept"
  REPEATED_QUESTION = "question that stands twice about one protagonist, kept"


def read(path: str | pathlib.Path = "") -> tuple[tuple[Episode, ...], Report]:
  """Reads the two files of PerLTQA: one episode per protagonist, in the order of the memory file.

  Args:
    path: the memory or the question file (`perltmem…`, `perltqa…`); the other lies beside it under the twin name. ""
      takes ATTRIMEM_DATA.

  Raises:
    ValueError: one of the files does not exist or is not PerLTQA; the message names file and field.
  """
  given = _FORMAT.resolve(path)
  names = [given.name.replace(other, own) for own, other in ((_MEMORY, _QUESTIONS), (_QUESTIONS, _MEMORY))]
  if names[0] == names[1]:
    raise ValueError(
      f"{given}: the name holds neither {_MEMORY!r} nor {_QUESTIONS!r}: keep the names of the benchmark."
    )
  memory, questions = (_FORMAT.resolve(given.with_name(name)) for name in names)
  return parse(_FORMAT.load(memory), _FORMAT.load(questions), str(memory), str(questions))


def parse(memory: Any, questions: Any, memory_file: str, file: str) -> tuple[tuple[Episode, ...], Report]:
  """As `read`, of JSON that is loaded already; the files are their names in messages and in the report."""
  log: Log = {}
  people = _FORMAT.typed(memory, dict, memory_file)
  if not people:
    raise _FORMAT.error(memory_file, "it holds no protagonist")
  asked: dict[str, list[Question]] = {name: [] for name in people}
  histories = {}
  for name, item in people.items():
    where = f"{memory_file}[{name!r}]"
    _FORMAT.typed(name, str, where)
    histories[name] = History(name, _sessions(_FORMAT.typed(item, dict, where), name, where, log))
  for index, item in enumerate(_FORMAT.typed(questions, list, file)):
    where = f"{file}[{index}]"
    for name, parts in _FORMAT.typed(item, dict, where).items():
      if name not in histories:
        raise _FORMAT.error(where, f"protagonist {name!r} is not in {memory_file}")
      asked[name] += _questions(parts, histories[name], len(asked[name]), f"{where}[{name!r}]", log)
  for name, some in asked.items():
    if not some:
      reading.note(log, Change.NO_QUESTIONS, name)
    _check_repeats(some, log)
  episodes = tuple(Episode(history, tuple(asked[name])) for name, history in histories.items() if asked[name])
  if not episodes:
    raise _FORMAT.error(file, "it holds no question")
  return episodes, reading.report(file, episodes, Change, log, labels={kind: kind for kind in KINDS})


def _sessions(item: Mapping[str, Any], name: str, where: str, log: Log) -> tuple[Session, ...]:
  parts = {kind: _FORMAT.typed(item.get(kind, {}), dict, f"{where}.{kind}") for kind in KINDS}
  for kind in KINDS:
    if not parts[kind]:
      reading.note(log, Change.MISSING_PART, f"{name}:{kind}")
  profile = [
    (f"profile:{key}", f"{key}: {_text(value, f'{name}:profile:{key}', f'{where}.profile.{key}', log)}")
    for key, value in parts["profile"].items()
  ]
  people = [
    (key, _person(_FORMAT.typed(value, dict, f"{where}.{KINDS[1]}.{key}"), key, name, where, log))
    for key, value in parts["social_relationship"].items()
  ]
  known = [_session(title, "", entries) for title, entries in (("profile", profile), (KINDS[1], people)) if entries]
  lived = [_event(key, value, name, f"{where}.events.{key}", log) for key, value in parts["events"].items()]
  for key, value in parts["dialogues"].items():
    lived += _dialogue(key, _FORMAT.typed(value, dict, f"{where}.dialogues.{key}"), name, where, log)
  if not known and not lived:
    raise _FORMAT.error(where, "the protagonist has no memory")
  return (*known, *sorted(lived, key=lambda session: session.date))


def _session(name: str, date: str, entries: Sequence[tuple[str, str]]) -> Session:
  return Session(name, date, tuple(Turn("", text, own) for own, text in entries))


def _person(item: Mapping[str, Any], key: str, name: str, where: str, log: Log) -> str:
  """A person as one text, such as "Ann: Bo's younger sister (sister)"."""
  place = f"{where}.{KINDS[1]}.{key}"
  who, what, role = (
    _text(item.get(field, ""), f"{name}:{key}", f"{place}.{field}", log)
    for field in ("Supporting Characters", "Description", "Relationship")
  )
  return f"{who}: {what} ({role})" if role else f"{who}: {what}"


def _event(key: str, value: Any, name: str, where: str, log: Log) -> Session:
  item = _FORMAT.typed(value, dict, where)
  place = f"{name}:{key}"
  content = _FORMAT.field(item, "content", str, where)
  words, text = _text(item.get("Creation Time", ""), place, f"{where}.Creation Time", log), _clean(content, place, log)
  return _session(key, _dated(words, place, log), [(key, f"[{words}] {text}" if words else text)])


def _dialogue(key: str, item: Mapping[str, Any], name: str, where: str, log: Log) -> Iterator[Session]:
  """A session for each date of a dialogue; the turns are numbered through all of them: "<dialogue>:<number from 1>"."""
  place, count = f"{where}.dialogues.{key}.contents", 0
  contents = _FORMAT.field(item, "contents", dict, f"{where}.dialogues.{key}")
  if len(contents) > 1:
    reading.note(log, Change.TWO_DATES, f"{name}:{key}")
  for number, (words, lines) in enumerate(contents.items(), 1):
    turns = []
    for index, line in enumerate(_FORMAT.typed(lines, list, f"{place}.{words}")):
      count += 1
      own = f"{key}:{count}"
      text = _clean(_FORMAT.typed(line, str, f"{place}.{words}[{index}]"), f"{name}:{own}", log)
      speaker, colon, said = text.partition(": ")
      if not text:
        reading.note(log, Change.EMPTY_TURN, f"{name}:{own}")
        continue
      if not colon or len(speaker) > 60:
        reading.note(log, Change.NO_SPEAKER, f"{name}:{own}")
        speaker, said = "", text
      turns.append(Turn(speaker, said, own))
    if turns:
      session = key if number == 1 else f"{key}@{number}"
      yield Session(session, _dated(words, f"{name}:{key}", log), tuple(turns))
    else:
      reading.note(log, Change.EMPTY_TALK, f"{name}:{key} {words!r}")


def _dated(words: str, place: str, log: Log) -> str:
  date = dates.loose(words)
  if not date:
    reading.note(log, Change.UNDATED, f"{place} {words!r}")
  return date


def _questions(parts: Any, history: History, start: int, where: str, log: Log) -> list[Question]:
  """All questions about a protagonist, keyed by their number: their texts repeat."""
  evidence = _places(history)
  day = max(session.date for session in history.sessions)[:10]
  found: list[Question] = []
  for kind, items in _FORMAT.typed(parts, dict, where).items():
    if kind not in KINDS:
      raise _FORMAT.error(where, f"kind {kind!r} is none of {', '.join(KINDS)}")
    for raw, under, place in _flat(items, f"{where}.{kind}"):
      name = f"{history.id}:q{start + len(found)}"
      text = _clean(_FORMAT.field(raw, "Question", str, place), name, log)
      answer = _text(raw.get("Answer"), name, f"{place}.Answer", log)
      if not text or not answer:
        raise _FORMAT.error(place, f"{'an answer' if text else 'a question'} without text")
      turns = _evidence(_FORMAT.field(raw, "Reference Memory", str, place), kind, under, evidence, name, log)
      found.append(Question(name, text, (answer,), kind, turns, day))
  return found


def _flat(items: Any, where: str) -> Iterator[tuple[Mapping[str, Any], str, str]]:
  """(question, key of the entry that it stands under, place): profile questions stand in no entry."""
  for index, item in enumerate(_FORMAT.typed(items, list, where)):
    place = f"{where}[{index}]"
    if "Question" in _FORMAT.typed(item, dict, place):
      yield item, "", place
      continue
    for key, some in item.items():
      for number, raw in enumerate(_FORMAT.typed(some, list, f"{place}.{key}")):
        yield _FORMAT.typed(raw, dict, f"{place}.{key}[{number}]"), key, f"{place}.{key}[{number}]"


def _places(history: History) -> dict[str, tuple[str, ...]]:
  """The turns that each id of a memory means: one for an entry, all of them for a dialogue."""
  places: dict[str, tuple[str, ...]] = {}
  for session in history.sessions:
    for turn in session.turns:
      for key in {turn.id, turn.id.rpartition(":")[0]} - {"", "profile"}:
        places[key] = (*places.get(key, ()), turn.id)
  return places


def _evidence(
  reference: str, kind: str, under: str, places: Mapping[str, tuple[str, ...]], name: str, log: Log
) -> tuple[str, ...]:
  """The turns that hold the answer, of a profile key or of the text of a Python list of ids."""
  ids = [f"profile:{reference}"] if kind == "profile" else _listed(reference)
  if not ids:
    reading.note(log, Change.UNREADABLE_REFERENCE, f"{name} {reference!r}")
    ids = [under]
  found: list[str] = []
  for own in ids:
    if own not in places:
      reading.note(log, Change.DANGLING_REFERENCE, f"{name} {own!r}")
    found += places.get(own, ())
  if not found:
    reading.note(log, Change.NO_EVIDENCE, name)
  return tuple(dict.fromkeys(found))


def _listed(text: str) -> list[str]:
  """["4_0_0"] of "['4_0_0']", and nothing of what is no such list."""
  try:
    value = ast.literal_eval(text.strip())
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return []
  return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else []


def _text(value: Any, place: str, where: str, log: Log) -> str:
  if isinstance(value, list):
    reading.note(log, Change.LIST, place)
    value = ", ".join(_FORMAT.typed(part, str, f"{where}[{index}]") for index, part in enumerate(value))
  if isinstance(value, (int, float)) and not isinstance(value, bool):
    reading.note(log, Change.NUMBER, place)
    return _FORMAT.number(value, where)
  return _clean(_FORMAT.typed(value, str, where), place, log)


def _clean(text: str, place: str, log: Log) -> str:
  for change, clean in (
    (Change.ENTITY, html.unescape),
    (Change.ZERO_WIDTH, reading.without_zero_width),
    (Change.TRIMMED, str.strip),
  ):
    cleaned = clean(text)
    if cleaned != text:
      reading.note(log, change, place)
    text = cleaned
  return text


def _check_repeats(questions: Sequence[Question], log: Log) -> None:
  first: dict[str, Question] = {}
  for question in questions:
    if first.setdefault(question.text, question) is not question:
      reading.note(log, Change.REPEATED_QUESTION, question.id)
