"""What the policy reads, as ids: a prefix with the session, which rollouts and modules share, and a suffix per module.

    prefix:  [system message]  user: the session                                  (the same for a whole group)
    suffix:  the module's instructions, its current records, start of the reply   (own to a rollout and a module)

Records stand in a prompt with their own ids, never re-encoded. Everything else is plain text put together by
concatenation: what a user typed is never searched for placeholders, and cannot hold a control token. Nothing rendered
is ever cut; what does not fit is left out before (`fit_records`, `fit_history`). No prompt names a concrete date or
example, because models copy those into their records.
"""

import dataclasses
import datetime
import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from attrimem_jax.memory.actions import FORMS, OPERATIONS, Op
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import History, Module, Record, Session, Turn


@dataclasses.dataclass(frozen=True)
class Prompts:
  """The words around sessions, records and questions; an empty string leaves its part out.

  Attributes:
    system: system message of the writing policy.
    session, undated_session: heading of a session; {date} is replaced.
    instructions: per module, what comes between the session and the current records.
    no_records: stands for the records of an empty module.
    usage: core memory's use of its budget; {used} and {budget} are replaced by token counts.
    write: what comes between the current records and the reply; {keywords} is replaced by those of the module.
    answer_system: system message of the answer model.
    memory: heading of the answer context; belongs to the shared prefix.
    no_memory: stands for an empty context.
    question, undated_question: {question} and {date} are replaced.
    weekdays: whether dates of sessions and questions name the day of the week, so that "last Friday" can be resolved.
  """

  system: str
  session: str
  undated_session: str
  instructions: Mapping[Module, str]
  no_records: str
  usage: str
  write: str
  answer_system: str
  memory: str
  no_memory: str
  question: str
  undated_question: str
  weekdays: bool


def session_prefix(chat: Chat, prompts: Prompts, session: Session) -> list[int]:
  """System message and opened user message with the session: the prefix that every rollout and module of it shares."""
  ids = chat.message("system", prompts.system) if prompts.system else []
  ids += chat.open("user") + chat.tokenizer.encode(_heading(prompts, session))
  for turn in session.turns:
    ids += chat.tokenizer.encode(_line(turn))
  return ids


def module_suffix(
  chat: Chat, prompts: Prompts, module: Module, records: Sequence[Record], usage: tuple[int, int] | None = None
) -> list[int]:
  """One module's instructions and current records, up to where its completion starts.

  Args:
    chat: of the policy.
    prompts: FULL, COMPACT or one's own.
    module: which memory to write.
    records: its current records (or the best-ranked of them, see `fit_records`), in order of their ids.
    usage: (tokens used, budget) of core memory, where the prompt is to say so.
  """
  encode = chat.tokenizer.encode
  ids = encode(prompts.instructions[module])
  for record in records:
    before, after = around(chat.tokenizer, f"#{record.id}", record)
    ids += [*before, *record.ids, *after]
  if not records:
    ids += encode(prompts.no_records)
  if usage is not None:
    ids += encode(fill(prompts.usage, used=str(usage[0]), budget=str(usage[1])))
  keywords = " or ".join(OPERATIONS[module])
  return ids + encode(fill(prompts.write, keywords=keywords)) + chat.reply()


def module_messages(
  prompts: Prompts, session: Session, module: Module, records: Sequence[Record], usage: tuple[int, int] | None = None
) -> list[tuple[str, str]]:
  """What `session_prefix` and `module_suffix` say, as (role, text) pairs for a model behind an endpoint."""
  parts = [_heading(prompts, session), *map(_line, session.turns), prompts.instructions[module]]
  parts += [f"#{record.id} {record.text}\n" for record in records] or [prompts.no_records]
  if usage is not None:
    parts.append(fill(prompts.usage, used=str(usage[0]), budget=str(usage[1])))
  parts.append(fill(prompts.write, keywords=" or ".join(OPERATIONS[module])))
  return [*([("system", prompts.system)] if prompts.system else []), ("user", "".join(parts))]


def around(tokenizer: Tokenizer, head: str, record: Record) -> tuple[list[int], list[int]]:
  """Ids before and after a record's own, which make one line of it: `head`, a blank, the text, a line break.

  Blank and line break are left out where the record's first and last token already hold them, as they mostly do.
  """
  first, last = tokenizer.bytes(record.ids[0]), tokenizer.bytes(record.ids[-1])
  blank = "" if not head or first[:1].isspace() else " "
  return tokenizer.encode(head + blank), [] if last.endswith(b"\n") else tokenizer.encode("\n")


def fit_records(tokenizer: Tokenizer, ranked: Iterable[Record], budget: int) -> tuple[Record, ...]:
  """The best of `ranked` (best first) whose lines hold at most `budget` tokens together, in order of their ids."""
  kept, used = [], 0
  for record in ranked:
    before, after = around(tokenizer, f"#{record.id}", record)
    used += len(before) + len(record.ids) + len(after)
    if used > budget:
      break
    kept.append(record)
  return tuple(sorted(kept, key=lambda r: r.id))


class Overflow(enum.StrEnum):
  """What to do with a session whose prefix is longer than its budget."""

  FAIL = "fail"
  SPLIT = "split"  # into consecutive sessions of the same date
  CUT = "cut"  # the oldest turns are left out


def fit_history(
  chat: Chat, prompts: Prompts, history: History, budget: int, overflow: Overflow
) -> tuple[History, tuple[int, ...]]:
  """The history with every session's prefix within `budget` tokens.

  Returns:
    The fitted history, and for each of its sessions the number of the session that it came from.

  Raises:
    ValueError: a session is too long under FAIL, or the prompt leaves no room for any turn.
  """
  parts = [_fit_session(chat, prompts, s, budget, overflow, history.id) for s in history.sessions]
  origin = tuple(number for number, group in enumerate(parts) for _ in group)
  return dataclasses.replace(history, sessions=tuple(itertools.chain(*parts))), origin


def _fit_session(
  chat: Chat, prompts: Prompts, session: Session, budget: int, overflow: Overflow, history: str
) -> list[Session]:
  length = len(session_prefix(chat, prompts, session))
  if length <= budget:
    return [session]
  if overflow == Overflow.FAIL:
    raise ValueError(
      f"session {session.id!r} of history {history!r} takes {length} tokens, the prompt may hold {budget}: "
      f"raise the limit, or choose {Overflow.SPLIT!s} or {Overflow.CUT!s}"
    )
  room = budget - len(session_prefix(chat, prompts, dataclasses.replace(session, turns=())))
  if overflow == Overflow.CUT:
    return [dataclasses.replace(session, turns=_newest(chat.tokenizer, session.turns, room))]
  groups = _groups(chat.tokenizer, session.turns, room)
  return [dataclasses.replace(session, id=f"{session.id}/{k}", turns=g) for k, g in enumerate(groups, 1)]


def _groups(tokenizer: Tokenizer, turns: Sequence[Turn], room: int) -> list[tuple[Turn, ...]]:
  """Consecutive runs of turns that hold at most `room` tokens each; a turn that is longer alone is divided."""
  groups: list[list[Turn]] = [[]]
  used = 0
  for turn in itertools.chain.from_iterable(_divide(tokenizer, turn, room) for turn in turns):
    cost = len(tokenizer.encode(_line(turn)))
    if groups[-1] and used + cost > room:
      groups.append([])
      used = 0
    groups[-1].append(turn)
    used += cost
  return [tuple(group) for group in groups]


def _newest(tokenizer: Tokenizer, turns: Sequence[Turn], room: int) -> tuple[Turn, ...]:
  """The last turns that hold at most `room` tokens together."""
  kept: list[Turn] = []
  used = 0
  parts = [part for turn in turns for part in _divide(tokenizer, turn, room)]
  for part in reversed(parts):
    used += len(tokenizer.encode(_line(part)))
    if used > room:
      break
    kept.append(part)
  return tuple(reversed(kept))


def _divide(tokenizer: Tokenizer, turn: Turn, room: int) -> list[Turn]:
  """The turn, halved between words until each part holds at most `room` tokens."""
  if len(tokenizer.encode(_line(turn))) <= room:
    return [turn]
  if len(turn.text) < 2:
    raise ValueError(f"a prompt with room for {room} tokens cannot hold a turn of {turn.speaker!r}: raise the limit")
  middle = len(turn.text) // 2
  blank = turn.text.rfind(" ", 1, middle + 1)
  middle = blank if blank > 0 else middle
  halves = turn.text[:middle], turn.text[middle:].lstrip(" ") or turn.text[middle:]
  return [part for half in halves for part in _divide(tokenizer, dataclasses.replace(turn, text=half), room)]


def _heading(prompts: Prompts, session: Session) -> str:
  if not session.date:
    return prompts.undated_session
  return fill(prompts.session, date=spoken_date(session.date, prompts.weekdays))


def _line(turn: Turn) -> str:
  return f"{turn.speaker}: {turn.text}\n" if turn.speaker else f"{turn.text}\n"


_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")  # in every locale


def spoken_date(date: str, weekday: bool) -> str:
  """An ISO date as prompts show it, with its time if it has one; what is no ISO date is shown as it is."""
  text = date.replace("T", " ", 1)
  try:
    return f"{_WEEKDAYS[datetime.datetime.fromisoformat(date).weekday()]}, {text}" if weekday else text
  except ValueError:
    return text


def fill(template: str, **values: str) -> str:
  """Puts values into a template of this module. One pass, so that braces inside a value mean nothing."""
  parts = re.split(r"\{([a-z]+)\}", template)
  return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


_MEANING = {
  Op.ADD: "stores a new record.",
  Op.APPEND: "adds one more entry to the profile.",
  Op.UPDATE: "puts a new version in the place of that record, when it has changed or more is known.",
  Op.REPLACE: "puts a new version in the place of that entry.",
  Op.MERGE: "puts one record in the place of two or more that belong together.",
  Op.REWRITE: "puts one new text in the place of the whole profile; use it to shorten the profile when space runs out.",
  Op.DELETE: "removes a record that turned out to be wrong or no longer matters.",
  Op.SKIP: "changes nothing; use it alone, when the session holds nothing for this memory.",
}

_DESCRIPTIONS = {
  Module.CORE: (
    "Core memory: a short profile of the people who speak: who they are, how they live, what they do, whom they "
    "care for, what they like and want. It is always read in full before a question is answered, but its space is "
    "small, so it holds only what matters most and lasts. If nothing in it needs to change, leave the reply "
    "empty."
  ),
  Module.EPISODIC: (
    "Episodic memory: what happened and what is planned. One record for each event: its date, who took part, what "
    "they did, where, and how it ended. Include events from before the session that are told in it. If the "
    "session holds no event, leave the reply empty."
  ),
  Module.SEMANTIC: (
    "Semantic memory: what is true of people, places and things beyond this session: facts, relations, "
    "possessions, opinions, tastes. One record for each fact, beginning with whom or what it is about. When a "
    "fact has changed, update its record; do not add a second one beside it."
  ),
  Module.PROCEDURAL: (
    "Procedural memory: how things are done: steps, routines, recipes, solutions that worked, and how a person "
    "wants to be helped. One record for each procedure, with its steps in order. Many sessions hold none."
  ),
}


def _instructions(module: Module) -> str:
  actions = "".join(f"{FORMS[op]}\n  {_MEANING[op]}\n" for op in OPERATIONS[module])
  return f"\n{_DESCRIPTIONS[module]}\n\nActions:\n{actions}\nCurrent records:\n"


FULL = Prompts(
  system=(
    "You keep the long-term memory of a conversation that goes on over many sessions. After each session you "
    "write down what will help to answer questions about it later, when the session itself can no longer be read.\n\n"
    "You are given the session with its date, one kind of memory with its current records, and the actions that "
    "can change this memory. Reply with actions only, each on its own line: no explanation, no list marks, no "
    "quotation marks. An action begins with its keyword in capital letters. A record is named by its number, "
    "written as # and digits. All that follows on the line is the record's text.\n\n"
    "Write each record so that it can be understood alone: full names instead of pronouns, one matter per record, "
    "in few words. Keep names, numbers, places and dates exactly as they were said. Where the session says when "
    "something happened in relation to its own date, work out the date and write that. Leave out greetings and "
    "small talk, do not repeat what is already recorded, and never add what was not said."
  ),
  session="Session of {date}:\n\n",
  undated_session="Session (date unknown):\n\n",
  instructions={module: _instructions(module) for module in Module},
  no_records="(none yet)\n",
  usage="Space used: {used} of {budget} tokens.\n",
  write="\nNow write the actions. Begin every line with {keywords}.",
  answer_system=(
    "You answer questions about past conversations from memory. The memory is a list of records, oldest first; "
    "the date in brackets is the day of the conversation from which a record was written. Use nothing but these "
    "records. Where two of them contradict each other, the more recent one is right. Work out dates and durations "
    "from the dates given. Answer with one short, complete sentence. If the memory does not hold the answer, "
    "reply: I do not know."
  ),
  memory="Memory:\n",
  no_memory="(empty)\n",
  question="\nQuestion (asked on {date}): {question}",
  undated_question="\nQuestion: {question}",
  weekdays=True,
)
"""For instruction-tuned language models: explains the task and the grammar."""

COMPACT = Prompts(
  system="",
  session="{date}\n",
  undated_session="",
  instructions={module: f"{module}:\n" for module in Module},
  no_records="",
  usage="",
  write="",
  answer_system="",
  memory="",
  no_memory="",
  question="{question}",
  undated_question="{question}",
  weekdays=False,
)
"""For small models that are trained on this very form: as few tokens as possible."""
