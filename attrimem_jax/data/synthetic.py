"""The synthetic world: an endless supply of short multi-session conversations with questions, drawn from a seed.

One user talks with a bot over a few dated sessions. Facts about the user and one or two other people are stated,
corrected, changed in later sessions and buried in chatter. Every question can be answered from the notes alone, and
every value comes from a pool of 30 or more, so that an answer model without memory cannot guess it.
"""

import dataclasses
import datetime

import numpy as np

from attrimem_jax.data import chatter, queries, world
from attrimem_jax.data.queries import ABSTAIN, Form, Query
from attrimem_jax.data.world import ATTRIBUTES, COUNTED, EVENTS, Fact, pick
from attrimem_jax.types import Episode, History, Note, Question, Session, Turn

__all__ = ["ABSTAIN", "KINDS", "SPLITS", "WorldConfig", "episode"]

SPLITS = ("train", "eval", "test")
KINDS = ("single-session", "multi-session", "temporal", "knowledge-update", "abstention")
BOT = "Bot"
YEAR = 2024
ABSTENTION_SHARE = 0.12
CORRECTION_SHARE = 0.05
UPDATE_SHARE = 0.3
EVENT_SHARE = 0.3
TEMPTATION = 6
USER_SHARE = 0.7
BURIED_SHARE = 0.3
_CORRECTIONS = ("Correction: {}", "I was wrong: {}", "Wait, to be exact: {}")
_UPDATES = ("Big news: {}", "Things changed: {}", "As of this week: {}", "{}")


@dataclasses.dataclass(frozen=True)
class WorldConfig:
  """Sizes of an episode, each drawn uniformly from an inclusive (low, high) range.

  Raises:
    ValueError: if a range is empty, or asks for no session, no fact or more than a year holds.
  """

  sessions: tuple[int, int] = (2, 4)
  facts: tuple[int, int] = (2, 4)
  chatter: tuple[int, int] = (1, 3)
  questions: tuple[int, int] = (6, 10)

  def __post_init__(self) -> None:
    for name, least, most in (("sessions", 1, 8), ("facts", 1, 6), ("chatter", 0, 20), ("questions", 1, 20)):
      low, high = getattr(self, name)
      if not least <= low <= high <= most:
        raise ValueError(f"WorldConfig.{name} is ({low}, {high}): give low <= high, both within {least}..{most}")


@dataclasses.dataclass(frozen=True)
class _Cast:
  user: str
  others: tuple[tuple[str, str], ...]  # (name, relation)

  def titles(self) -> dict[str, str]:
    return {name: f"My {relation} {name}" for name, relation in self.others}


@dataclasses.dataclass(frozen=True)
class _Told:
  """A fact as it is told: in which session, how it stands to what was said before, and (once rendered) which turn."""

  session: int
  fact: Fact
  manner: str = "new"  # or "update", "correction"
  turn: str = ""


def episode(config: WorldConfig, split: str, seed: int, index: int) -> Episode:
  """Returns one conversation with its questions and notes: a pure function of its arguments.

  Args:
    config: the sizes.
    split: "train", "eval" or "test"; splits never share a history, as each draws from a stream of its own.
    seed: not negative.
    index: not negative; which episode of the split.

  Raises:
    ValueError: for an unknown split, or a negative seed or index.
  """
  if split not in SPLITS:
    raise ValueError(f"synthetic.episode got split {split!r}: give one of {', '.join(SPLITS)}")
  if seed < 0 or index < 0:
    raise ValueError(f"synthetic.episode got seed {seed} and index {index}: give numbers of 0 or more")
  rng = np.random.default_rng(np.random.SeedSequence([seed, SPLITS.index(split), index]))
  name = f"synthetic-{split}-{seed}-{index}"
  cast = _draw_cast(rng)
  told = _draw_story(rng, config, cast)
  dates = _draw_dates(rng, 1 + told[-1].session)
  sessions, told = _render(rng, config, cast, told, dates)
  questions = _draw_questions(rng, config, cast, told, dates, name)
  return Episode(History(name, sessions), questions, _notes(told, cast.user))


def _draw_cast(rng: np.random.Generator) -> _Cast:
  names = [world.NAMES[i] for i in rng.choice(len(world.NAMES), size=1 + int(rng.integers(1, 3)), replace=False)]
  return _Cast(names[0], tuple((name, pick(rng, world.RELATIONS)) for name in names[1:]))


def _between(rng: np.random.Generator, low_high: tuple[int, int]) -> int:
  return int(rng.integers(low_high[0], low_high[1] + 1))


def _draw_dates(rng: np.random.Generator, count: int) -> tuple[str, ...]:
  days = np.sort(rng.choice(360, size=count, replace=False))  # leaves days at the end of the year to ask on
  return tuple((datetime.date(YEAR, 1, 1) + datetime.timedelta(int(day))).isoformat() for day in days)


def _draw_story(rng: np.random.Generator, config: WorldConfig, cast: _Cast) -> list[_Told]:
  """Returns what is told, in order. One kind of event happens one to four times, so there is something to count."""
  slots = [s for s in range(_between(rng, config.sessions)) for _ in range(_between(rng, config.facts))]
  theme = pick(rng, COUNTED)
  size = min(int(rng.integers(1, 5)), max(1, len(slots) // 2))
  themed = set(rng.choice(len(slots), size=size, replace=False).tolist())
  told: list[_Told] = []
  for place, session in enumerate(slots):
    if place in themed:
      told.append(_Told(session, _new_event(rng, cast, told, theme)))
    else:
      told.extend(_draw_told(rng, cast, told, session, theme))
  return told


def _draw_told(rng: np.random.Generator, cast: _Cast, told: list[_Told], session: int, theme: str) -> list[_Told]:
  """Returns a change of an earlier session's state, an event of another kind than the theme, or a new state."""
  latest = {t.fact.topic: t for t in told if ATTRIBUTES[t.fact.attribute].event is None}
  changeable = [t for t in latest.values() if t.session < session]
  news = _untold(cast, set(latest))
  if changeable and (rng.random() < UPDATE_SHARE or not any(news)):
    fact = _other_value(rng, pick(rng, changeable).fact)
    return [_Told(session, fact, pick(rng, ("update", "update", "correction")))]
  kinds = [kind for kind in EVENTS if kind != theme and not any(t.fact.attribute == kind for t in told)]
  if kinds and rng.random() < EVENT_SHARE:
    return [_Told(session, _new_event(rng, cast, told, pick(rng, kinds)))]
  fact = _new_state(rng, *news)
  if rng.random() < CORRECTION_SHARE:
    return [_Told(session, _other_value(rng, fact)), _Told(session, fact, "correction")]
  return [_Told(session, fact)]


def _new_event(rng: np.random.Generator, cast: _Cast, told: list[_Told], kind: str) -> Fact:
  seen = {t.fact.value for t in told if t.fact.attribute == kind}
  return Fact(cast.user, kind, pick(rng, [value for value in ATTRIBUTES[kind].values if value not in seen]))


def _untold(cast: _Cast, known: set[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
  """Returns the topics of states that are not known yet: the user's own, and those of others."""
  own = [(cast.user, name) for name in world.STATES if (cast.user, name) not in known]
  others = [(other, name) for other, _ in cast.others for name in world.SHARED_STATES if (other, name) not in known]
  return own, others


def _new_state(rng: np.random.Generator, own: list[tuple[str, str]], others: list[tuple[str, str]]) -> Fact:
  subject, name = pick(rng, own if own and (not others or rng.random() < USER_SHARE) else others)
  return Fact(subject, name, pick(rng, ATTRIBUTES[name].values))


def _other_value(rng: np.random.Generator, fact: Fact) -> Fact:
  values = [value for value in ATTRIBUTES[fact.attribute].values if value != fact.value]
  return dataclasses.replace(fact, value=pick(rng, values))


def _say(rng: np.random.Generator, cast: _Cast, told: _Told) -> str:
  """Returns a fact in the user's words, at times between two phrases that say nothing."""
  attribute, titles = ATTRIBUTES[told.fact.attribute], cast.titles()
  phrases = attribute.first if told.fact.subject == cast.user else attribute.third
  text = pick(rng, phrases).format(s=titles.get(told.fact.subject, ""), v=told.fact.value)
  if told.manner != "new":
    text = pick(rng, _CORRECTIONS if told.manner == "correction" else _UPDATES).replace("{}", text)
  if rng.random() < BURIED_SHARE:
    text = f"{pick(rng, chatter.BEFORE)} {text}" if rng.random() < 0.5 else f"{text} {pick(rng, chatter.AFTER)}"
  return text


def _render(
  rng: np.random.Generator, config: WorldConfig, cast: _Cast, told: list[_Told], dates: tuple[str, ...]
) -> tuple[tuple[Session, ...], list[_Told]]:
  """Returns the sessions, and what was told with the ids of its turns."""
  sessions, placed = [], []
  for number, date in enumerate(dates):
    lines: list[_Told | None] = [t for t in told if t.session == number]
    for _ in range(_between(rng, config.chatter)):
      lines.insert(int(rng.integers(len(lines) + 1)), None)
    turns: list[Turn] = []
    for line in lines:
      turn = f"S{number + 1}:{len(turns) + 1}"
      if line is not None:
        placed.append(dataclasses.replace(line, turn=turn))
      turns.append(Turn(cast.user, chatter.say(rng) if line is None else _say(rng, cast, line), turn))
      turns.append(Turn(BOT, pick(rng, chatter.REPLIES), f"S{number + 1}:{len(turns) + 1}"))
    sessions.append(Session(f"S{number + 1}", date, tuple(turns)))
  return tuple(sessions), placed


def _notes(told: list[_Told], user: str) -> tuple[Note, ...]:
  """Returns one note per fact; of a state that a session corrects, only what it was corrected to."""
  last = {(t.session, t.fact.topic): t for t in told if ATTRIBUTES[t.fact.attribute].event is None}
  kept = [t for t in told if last.get((t.session, t.fact.topic), t) is t]
  return tuple(Note(t.session, world.home_module(t.fact, user), world.record_text(t.fact)) for t in kept)


def _draw_questions(
  rng: np.random.Generator, config: WorldConfig, cast: _Cast, told: list[_Told], dates: tuple[str, ...], name: str
) -> tuple[Question, ...]:
  total = _between(rng, config.questions)
  absent = int(rng.binomial(total, ABSTENTION_SHARE))
  asked = _take_in_turns(rng, _answerable(rng, told), total - absent)
  asked += [("abstention", query) for query in _unanswerable(rng, cast, told, absent)]
  asked = [asked[i] for i in rng.permutation(len(asked))]
  day = (datetime.date.fromisoformat(dates[-1]) + datetime.timedelta(1)).isoformat()
  numbered = [(f"{name}:q{i + 1}", *pair) for i, pair in enumerate(asked)]
  return tuple(_question(rng, told, dates, query, kind, number, day) for number, kind, query in numbered)


def _question(
  rng: np.random.Generator, told: list[_Told], dates: tuple[str, ...], query: Query, kind: str, name: str, day: str
) -> Question:
  text = queries.word(query, rng, changed=kind == "knowledge-update")
  reply = queries.resolve(query, [(t.fact, dates[t.session]) for t in told])
  assert (reply is None) == (kind == "abstention"), f"{text} of kind {kind} has reply {reply}"
  if reply is None:
    return Question(name, text, (), kind, (), day)
  return Question(name, text, (reply.bare, reply.sentence), kind, tuple(told[i].turn for i in reply.used), day)


def _take_in_turns(rng: np.random.Generator, pools: dict[str, list[Query]], count: int) -> list[tuple[str, Query]]:
  """Returns up to `count` queries, taking from each kind in turn so that a common kind does not crowd out the rest."""
  queues = {kind: [pool[i] for i in rng.permutation(len(pool))] for kind, pool in pools.items()}
  taken: list[tuple[str, Query]] = []
  while len(taken) < count and any(queues.values()):
    taken += [(kind, queue.pop()) for kind, queue in queues.items() if queue]
  return taken[:count]


def _answerable(rng: np.random.Generator, told: list[_Told]) -> dict[str, list[Query]]:
  """Returns the queries that the story answers, by kind."""
  states = [t for t in told if ATTRIBUTES[t.fact.attribute].event is None]
  events = [t for t in told if ATTRIBUTES[t.fact.attribute].event is not None]
  told_in: dict[tuple[str, str], set[int]] = {}
  for t in states:
    told_in.setdefault(t.fact.topic, set()).add(t.session)
  kinds = [t.fact.attribute for t in events]
  counted = [kind for kind in COUNTED if kinds.count(kind) > (rng.random() < 0.7)]  # or most counts would be 1
  once = [t for t in events if kinds.count(t.fact.attribute) == 1]
  pairs = [(a, b) for a in once for b in once if a.session != b.session]
  return {
    "knowledge-update": [Query(Form.VALUE, *topic) for topic, sessions in told_in.items() if len(sessions) > 1],
    "single-session": [Query(Form.VALUE, *topic) for topic, sessions in told_in.items() if len(sessions) == 1]
    + [Query(Form.VALUE, *t.fact.topic) for t in once],
    "multi-session": [Query(Form.COUNT, events[0].fact.subject, kind) for kind in counted],
    "temporal": [Query(Form.WHEN, *t.fact.topic) for t in once]
    + [Query(Form.FIRST, *one.fact.topic, two.fact.attribute) for one, two in [pick(rng, pairs) for _ in pairs[:1]]],
  }


def _unanswerable(rng: np.random.Generator, cast: _Cast, told: list[_Told], count: int) -> list[Query]:
  """Returns queries on what was never told, mostly on what was told of somebody else, or on a day."""
  known = {t.fact.topic for t in told}
  topics = [(cast.user, name) for name in ATTRIBUTES]
  topics += [(other, name) for other, _ in cast.others for name in world.SHARED_STATES]
  missing = [topic for topic in topics if topic not in known]
  asked = [Query(Form.VALUE, *topic) for topic in missing]
  asked += [Query(Form.WHEN, *topic) for topic in missing if topic[1] in EVENTS]
  told_of = {name for _, name in known}
  weights = np.array([TEMPTATION if query.form == Form.WHEN or query.attribute in told_of else 1 for query in asked])
  chosen = rng.choice(len(asked), min(count, len(asked)), replace=False, p=weights / weights.sum()) if asked else ()
  return [asked[i] for i in chosen]
