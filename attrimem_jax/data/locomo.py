"""Reads LoCoMo (Maharana et al. 2024, snap-research/locomo) into episodes.

The file has many small faults: several evidence ids in one string, ids of turns that do not exist, numbers as answers,
dates of sessions that were never written. Each is mended or kept by a stated rule and listed in a `Report`; nothing is
dropped silently, and a file that is not LoCoMo is an error that names the place.
"""

import enum
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attrimem_jax import checks
from attrimem_jax.data import dates, reading
from attrimem_jax.data.reading import Log, Report
from attrimem_jax.types import Episode, History, Module, Note, Question, Session, Turn

# The data set's own meaning of its numbers; several readers of LoCoMo mislabel 1, 3 and 4.
CATEGORIES: Mapping[int, str] = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
ADVERSARIAL = CATEGORIES[5]
KINDS = tuple(CATEGORIES.values())
NOTES = True  # its observations


class Change(enum.StrEnum):
  """What the reader met that is not as it should be, and what it did."""

  DATE_WITHOUT_SESSION = "date without a session, left out"
  SESSION_WITHOUT_DATE = "session without a date, its date is unknown"
  EMPTY_SESSION = "session without turns, left out"
  DATE_OUT_OF_ORDER = "session dated before the one that precedes it, order kept"
  REPEATED_TURN = "turn id that stands twice, kept"
  UNKNOWN_SPEAKER = "turn by neither speaker, kept"
  EMPTY_TURN = "turn without text or image, kept"
  TRIMMED = "blanks around a text, removed"
  ZERO_WIDTH = "zero-width characters in a question or answer, removed"
  NUMBER = "number as an answer, written as text"
  ADVERSARIAL_WITH_ANSWER = "adversarial question that has an answer, which is its gold"
  JOINED_EVIDENCE = "several evidence ids in one string, split"
  MENDED_EVIDENCE = "evidence id misspelt, mended"
  UNREADABLE_EVIDENCE = "evidence that is no turn id, left out"
  DANGLING_EVIDENCE = "evidence of a turn that does not exist, left out"
  NO_EVIDENCE = "question without evidence, kept"
  REPEATED_QUESTION = "question that stands twice with the same gold, kept"
  CONTRADICTORY_QUESTION = "question that stands twice with different gold, kept"
  NOTE_WITHOUT_SESSION = "observation about a session that does not exist, left out"


_FORMAT = reading.Format("LoCoMo")
_LABELS = {name: f"{number} {name}" for number, name in CATEGORIES.items()}


def read(path: str | pathlib.Path = "") -> tuple[tuple[Episode, ...], Report]:
  """Reads a LoCoMo file: one episode per conversation, in the order of the file.

  Args:
    path: the JSON file; "" takes the environment variable ATTRIMEM_DATA.

  Raises:
    ValueError: there is no such file, or it is not LoCoMo; the message names file and field.
  """
  file = _FORMAT.resolve(path)
  return parse(_FORMAT.load(file), str(file))


def parse(data: Any, file: str) -> tuple[tuple[Episode, ...], Report]:
  """As `read`, of JSON that is loaded already; `file` is its name in messages and in the report."""
  conversations = _FORMAT.typed(data, list, file)
  if not conversations:
    raise _FORMAT.error(file, "the list is empty")
  log: Log = {}
  episodes = []
  for index, item in enumerate(conversations):
    where = f"{file}[{index}]"
    episodes.append(_episode(_FORMAT.typed(item, dict, where), where, log))
  _FORMAT.unique([episode.history.id for episode in episodes], "sample_id", file)
  images = sum(_caption(turn) is not None for item in conversations for turn in _raw_turns(item["conversation"]))
  return tuple(episodes), reading.report(file, episodes, Change, log, images=images, labels=_LABELS)


_SESSION = re.compile(r"session_(\d+)")
_SESSION_DATE = re.compile(r"session_(\d+)_date_time")
_OBSERVATION = re.compile(r"session_(\d+)_observation")
_NUMBER = re.compile(r"[0-9]{1,9}")
_EVIDENCE = re.compile(r"D:?([0-9]{1,9}):([0-9]{1,9})")


def _trim(text: str, place: str, log: Log) -> str:
  if text != text.strip():
    reading.note(log, Change.TRIMMED, place)
  return text.strip()


def _episode(item: Mapping[str, Any], where: str, log: Log) -> Episode:
  name = _FORMAT.field(item, "sample_id", str, where)
  conversation = _FORMAT.field(item, "conversation", dict, where)
  numbered = _sessions(conversation, name, f"{where}.conversation", log)
  history = History(name, tuple(session for _, session in numbered))
  questions = _questions(_FORMAT.field(item, "qa", list, where), history, f"{where}.qa", log)
  positions = {number: position for position, (number, _) in enumerate(numbered)}
  observation = _FORMAT.typed(item.get("observation", {}), dict, f"{where}.observation")
  return Episode(history, questions, _notes(observation, positions, name, f"{where}.observation", log))


def _numbered(conversation: Mapping[str, Any], pattern: re.Pattern[str], where: str) -> dict[int, str]:
  """Keys that match `pattern` by the number in them, rising: as text, session_10 would stand before session_2."""
  found: dict[int, str] = {}
  for key in conversation:
    match = pattern.fullmatch(key)
    if match is None:
      continue
    if not _NUMBER.fullmatch(match[1]):
      raise _FORMAT.error(where, f"key {checks.shown(key)} has no number of up to nine digits 0 to 9")
    other = found.setdefault(int(match[1]), key)
    if other is not key:
      raise _FORMAT.error(where, f"keys {other!r} and {key!r} have the same number")
  return dict(sorted(found.items()))


def _raw_turns(conversation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  return [turn for key in conversation if _SESSION.fullmatch(key) for turn in conversation[key]]


def _sessions(conversation: Mapping[str, Any], name: str, where: str, log: Log) -> list[tuple[int, Session]]:
  """The sessions that have turns, with their numbers, in the order of the numbers."""
  date_keys, keys = _numbered(conversation, _SESSION_DATE, where), _numbered(conversation, _SESSION, where)
  for number in sorted(date_keys.keys() - keys.keys()):
    reading.note(log, Change.DATE_WITHOUT_SESSION, f"{name}:session_{number}")
  speakers = {_FORMAT.field(conversation, key, str, where) for key in ("speaker_a", "speaker_b")}
  sessions: list[tuple[int, Session]] = []
  for number, key in keys.items():
    turns = _turns(_FORMAT.field(conversation, key, list, where), speakers, name, f"{where}.{key}", log)
    date = _date(conversation, date_keys.get(number), f"{name}:session_{number}", where, log)
    if turns:
      sessions.append((number, Session(f"session_{number}", date, turns)))
    else:
      reading.note(log, Change.EMPTY_SESSION, f"{name}:session_{number}")
  if not sessions:
    raise _FORMAT.error(where, "the conversation has no sessions")
  _check_order([session for _, session in sessions], name, log)
  return sessions


def _date(conversation: Mapping[str, Any], key: str | None, place: str, where: str, log: Log) -> str:
  if key is None:
    reading.note(log, Change.SESSION_WITHOUT_DATE, place)
    return ""
  try:
    return dates.parse(_FORMAT.field(conversation, key, str, where))
  except ValueError as error:
    raise _FORMAT.error(f"{where}.{key}", str(error)) from error


def _check_order(sessions: Sequence[Session], name: str, log: Log) -> None:
  latest = ""
  for session in sessions:
    if session.date and session.date < latest:
      reading.note(log, Change.DATE_OUT_OF_ORDER, f"{name}:{session.id}")
    latest = max(latest, session.date)


def _turns(items: list[Any], speakers: set[str], name: str, where: str, log: Log) -> tuple[Turn, ...]:
  turns: list[Turn] = []
  for index, item in enumerate(items):
    place = f"{where}[{index}]"
    raw = _FORMAT.typed(item, dict, place)
    turn = Turn(
      _FORMAT.field(raw, "speaker", str, place), _said(raw, name, place, log), _FORMAT.field(raw, "dia_id", str, place)
    )
    if turn.speaker not in speakers:
      reading.note(log, Change.UNKNOWN_SPEAKER, f"{name}:{turn.id}")
    if not turn.text:
      reading.note(log, Change.EMPTY_TURN, f"{name}:{turn.id}")
    if any(turn.id == other.id for other in turns):
      reading.note(log, Change.REPEATED_TURN, f"{name}:{turn.id}")
    turns.append(turn)
  return tuple(turns)


def _said(turn: Mapping[str, Any], name: str, where: str, log: Log) -> str:
  """The words of a turn, and what its image shows, since some answers stand only there."""
  text = _trim(_FORMAT.field(turn, "text", str, where), f"{name}:{turn.get('dia_id')}", log)
  _FORMAT.typed(turn.get("blip_caption") or "", str, f"{where}.blip_caption")
  caption = _caption(turn)
  return text if caption is None else f"{text} [shares an image: {caption}]".lstrip()


def _caption(turn: Mapping[str, Any]) -> str | None:
  caption = turn.get("blip_caption")
  return caption.strip() if isinstance(caption, str) and caption.strip() else None


def _notes(
  observation: Mapping[str, Any], positions: Mapping[int, int], name: str, where: str, log: Log
) -> tuple[Note, ...]:
  """What the annotators observed of each session: {session: {speaker: [[text, turn ids], ...]}}."""
  notes = []
  for number, key in _numbered(observation, _OBSERVATION, where).items():
    if number not in positions:
      reading.note(log, Change.NOTE_WITHOUT_SESSION, f"{name}:{key}")
      continue
    for speaker, items in _FORMAT.typed(observation[key], dict, f"{where}.{key}").items():
      _FORMAT.typed(speaker, str, f"{where}.{key}")
      for index, item in enumerate(_FORMAT.typed(items, list, f"{where}.{key}.{speaker}")):
        text = _observed(item, f"{where}.{key}.{speaker}[{index}]")
        notes.append(Note(positions[number], Module.SEMANTIC, text))
  return tuple(notes)


def _observed(item: Any, where: str) -> str:
  if not _FORMAT.typed(item, list, where):
    raise _FORMAT.error(where, "an observation without text")
  return _FORMAT.typed(item[0], str, f"{where}[0]").strip()


def _questions(items: list[Any], history: History, where: str, log: Log) -> tuple[Question, ...]:
  """All questions, keyed by their index: their texts repeat."""
  turns = {turn.id for session in history.sessions for turn in session.turns}
  date = history.sessions[-1].date[:10]
  questions: list[Question] = []
  for index, item in enumerate(items):
    place = f"{where}[{index}]"
    raw, name = _FORMAT.typed(item, dict, place), f"{history.id}:q{index}"
    text = _clean(_FORMAT.field(raw, "question", str, place), name, log)
    if not text:
      raise _FORMAT.error(f"{place}.question", "a question without text")
    kind = _kind(raw, place)
    evidence = _evidence(_FORMAT.field(raw, "evidence", list, place), turns, name, place, log)
    questions.append(Question(name, text, _answers(raw, kind, name, place, log), kind, evidence, date))
  _check_repeats(questions, log)
  return tuple(questions)


def _kind(item: Mapping[str, Any], where: str) -> str:
  category = _FORMAT.field(item, "category", int, where)
  if category not in CATEGORIES:
    raise _FORMAT.error(f"{where}.category", f"category {category} is none of {', '.join(map(str, CATEGORIES))}")
  return CATEGORIES[category]


def _clean(text: str, name: str, log: Log) -> str:
  visible = reading.without_zero_width(text)
  if visible != text:
    reading.note(log, Change.ZERO_WIDTH, name)
  return _trim(visible, name, log)


def _answers(item: Mapping[str, Any], kind: str, name: str, where: str, log: Log) -> tuple[str, ...]:
  """The gold. An adversarial question has none: `adversarial_answer` is the wrong one that a model is lured to."""
  if kind == ADVERSARIAL:
    if "answer" not in item:
      return ()
    reading.note(log, Change.ADVERSARIAL_WITH_ANSWER, name)
  answer = item.get("answer")
  if isinstance(answer, (int, float)) and not isinstance(answer, bool):
    reading.note(log, Change.NUMBER, name)
    return (_FORMAT.number(answer, f"{where}.answer"),)
  text = _clean(_FORMAT.field(item, "answer", str, where), name, log)
  if not text:
    raise _FORMAT.error(f"{where}.answer", "an answer without text")
  return (text,)


def _evidence(items: list[Any], turns: set[str], name: str, where: str, log: Log) -> tuple[str, ...]:
  found: list[str] = []
  for index, item in enumerate(items):
    parts = re.split(r"[;,\s]+", _FORMAT.typed(item, str, f"{where}.evidence[{index}]").strip("; ,\t\n"))
    if len(parts) > 1:
      reading.note(log, Change.JOINED_EVIDENCE, f"{name} {item!r}")
    found.extend(_turn_id(part, turns, name, log) for part in parts)
  kept = tuple(dict.fromkeys(turn for turn in found if turn))
  if not items:
    reading.note(log, Change.NO_EVIDENCE, name)
  return kept


def _turn_id(text: str, turns: set[str], name: str, log: Log) -> str:
  """The id of the turn that `text` means, or "" where it means none: "D30:05" is D30:5 and "D:11:26" is D11:26."""
  if text in turns:
    return text
  match = _EVIDENCE.fullmatch(text)
  if match is None:
    reading.note(log, Change.UNREADABLE_EVIDENCE, f"{name} {text!r}")
    return ""
  mended = f"D{int(match[1])}:{int(match[2])}"
  known = mended in turns
  reading.note(log, Change.MENDED_EVIDENCE if known else Change.DANGLING_EVIDENCE, f"{name} {text!r}")
  return mended if known else ""


def _check_repeats(questions: Sequence[Question], log: Log) -> None:
  first: dict[str, Question] = {}
  for question in questions:
    earlier = first.setdefault(question.text, question)
    if earlier is not question:
      same = earlier.answers == question.answers
      reading.note(log, Change.REPEATED_QUESTION if same else Change.CONTRADICTORY_QUESTION, question.id)
