"""Examples for an answer model that must lean on memory: records as a careless policy leaves them, and the answers.

The target is the gold sentence wherever the words that decide it (subject and value) are still in the memory, and the
abstention sentence wherever they are not, whatever the truth was: the model never sees a reason to answer from anything
but the records.
"""

import dataclasses
import re

import numpy as np

from attrimem_jax.data import chatter, queries, world
from attrimem_jax.data.teacher import gold_records
from attrimem_jax.data.world import ATTRIBUTES, Fact, pick
from attrimem_jax.types import Episode, Question

_OPENERS = ("Note:", "Today", "User said", "Now", "Also", "Fact:", "-", "Yes,", "I see,", "{s} said")
_ENDINGS = (".", " .", ",", "!", ";", "..", " now", " today", " .", " too")


@dataclasses.dataclass(frozen=True)
class _Item:
  """A record and the facts that can still be read from it."""

  text: str
  date: str
  facts: tuple[Fact, ...]


@dataclasses.dataclass(frozen=True)
class _Decay:
  """How far a memory has decayed: the share of records that are lost, vague, misremembered, misworded or joined."""

  lost: float
  vague: float
  wrong: float
  misworded: float
  joined: float
  junk: int
  keep_old: bool


def answer_example(
  rng: np.random.Generator, episode: Episode
) -> tuple[list[tuple[str, str]], list[tuple[Question, str]]]:
  """Returns (records as (text, date), questions with the sentence that the records call for).

  Records are in time order, as a context shows them. One example in sixteen has no records at all.
  """
  decay = _draw_decay(rng)
  items = [] if rng.random() < 1 / 16 else _decayed_memory(rng, episode, decay)
  facts = [(fact, item.date) for item in items for fact in item.facts]
  targets = [(question, _target(question, facts)) for question in episode.questions]
  return [(item.text, item.date) for item in items], targets


def _target(question: Question, facts: list[tuple[Fact, str]]) -> str:
  query = queries.read(question.text)
  assert query is not None, f"not a question of the synthetic world: {question.text!r}"
  return queries.sentence(query, facts)


def _draw_decay(rng: np.random.Generator) -> _Decay:
  return _Decay(
    lost=pick(rng, (0.0, 0.0, 0.0, 0.1, 0.4)),
    vague=pick(rng, (0.0, 0.0, 0.1, 0.2)),
    wrong=pick(rng, (0.0, 0.0, 0.1)),
    misworded=pick(rng, (0.0, 0.0, 0.1, 0.4)),
    joined=pick(rng, (0.0, 0.0, 0.0, 0.3)),
    junk=pick(rng, (0, 0, 1, 2, 4)),
    keep_old=bool(rng.random() < 0.4),
  )


def _decayed_memory(rng: np.random.Generator, episode: Episode, decay: _Decay) -> list[_Item]:
  items = []
  for _, text, date in gold_records(episode, keep_old=decay.keep_old):
    if rng.random() >= decay.lost:
      items.extend(_remembered(rng, text, date, decay))
  for _ in range(decay.junk):
    items.append(_junk(rng, episode))
  # Records of one session come in no fixed order (four modules write them), those of different sessions by date.
  items = sorted((items[i] for i in rng.permutation(len(items))), key=lambda item: item.date)
  items = _join(rng, items, decay.joined)
  return [_misword(rng, item) if rng.random() < decay.misworded else item for item in items]


def _remembered(rng: np.random.Generator, text: str, date: str, decay: _Decay) -> list[_Item]:
  """Returns a record as it was, vague, with a wrong value, or twice (states only: an event would count twice)."""
  fact = world.read_record(text)
  assert fact is not None, f"not a note of the synthetic world: {text!r}"
  if rng.random() < decay.vague:
    lost = dataclasses.replace(fact, value="")
    return [_Item(world.record_text(lost), date, () if ATTRIBUTES[fact.attribute].event is None else (lost,))]
  if rng.random() < decay.wrong:
    fact = dataclasses.replace(fact, value=pick(rng, ATTRIBUTES[fact.attribute].values))
  item = _Item(world.record_text(fact), date, (fact,))
  twice = ATTRIBUTES[fact.attribute].event is None and rng.random() < 0.05
  return [item, item] if twice else [item]


def _junk(rng: np.random.Generator, episode: Episode) -> _Item:
  session = pick(rng, episode.history.sessions)
  user = session.turns[0].speaker
  text = chatter.say(rng)
  note = chatter.careless_note(text, user)
  assert note is not None
  return _Item(text if rng.random() < 0.3 else note[1], session.date, ())


def _join(rng: np.random.Generator, items: list[_Item], share: float) -> list[_Item]:
  """Puts some neighbours of one date into one record, as a policy that merges or compresses would."""
  joined: list[_Item] = []
  for item in items:
    if joined and joined[-1].date == item.date and rng.random() < share:
      joined[-1] = _joined(rng, joined[-1], item)
    else:
      joined.append(item)
  return joined


def _joined(rng: np.random.Generator, one: _Item, two: _Item) -> _Item:
  subject, _, rest = two.text.partition(" ")
  if len(one.facts) == 1 and one.facts[0].subject == subject and rng.random() < 0.5:
    return _Item(f"{one.text} and {rest}", one.date, one.facts + two.facts)
  link = pick(rng, (", ", ". ", " and ", "; "))
  return _Item(f"{one.text.rstrip('.')}{link}{two.text}", one.date, one.facts + two.facts)


def _misword(rng: np.random.Generator, item: _Item) -> _Item:
  """Spoils the wording of a record in one or two ways, and forgets the facts that no longer follow from its words."""
  for _ in range(int(rng.integers(1, 3))):
    item = pick(rng, (_open, _end, _drop_word, _drop_word, _repeat_word, _cut))(rng, item)
  return item


def _still_said(item: _Item) -> _Item:
  """Keeps the facts that the words of the text still tell: without one of them it could mean anything."""
  words = set(re.findall(r"\w+", item.text))
  return dataclasses.replace(item, facts=tuple(fact for fact in item.facts if _told_by(words, fact)))


def _told_by(words: set[str], fact: Fact) -> bool:
  """Whether subject, value and unit are among the words; for an event without a value, the word that stands for it."""
  units = {"age": {"years", "old"}, "run": {"km"}}.get(fact.attribute, words)
  value = {fact.value} if fact.value else {"some", "something"}
  return fact.subject in words and bool(words & value) and bool(words & units)


def _open(rng: np.random.Generator, item: _Item) -> _Item:
  subject = item.text.split(" ", 1)[0]
  return dataclasses.replace(item, text=f"{pick(rng, _OPENERS).format(s=subject)} {item.text}")


def _end(rng: np.random.Generator, item: _Item) -> _Item:
  return dataclasses.replace(item, text=item.text + pick(rng, _ENDINGS))


def _drop_word(rng: np.random.Generator, item: _Item) -> _Item:
  words = item.text.split(" ")
  if len(words) < 2:
    return item
  del words[int(rng.integers(len(words)))]
  return _still_said(dataclasses.replace(item, text=" ".join(words)))


def _repeat_word(rng: np.random.Generator, item: _Item) -> _Item:
  words = item.text.split(" ")
  place = int(rng.integers(len(words)))
  return dataclasses.replace(item, text=" ".join(words[: place + 1] + words[place:]))


def _cut(rng: np.random.Generator, item: _Item) -> _Item:
  """Ends a record early, as a length limit would."""
  words = item.text.split(" ")
  return _still_said(dataclasses.replace(item, text=" ".join(words[: max(1, len(words) - int(rng.integers(1, 3)))])))
