"""Questions of the synthetic world as data: worded, read back, and answered from facts by rule.

The rule-based answer is the definition of right: gold answers and the targets of the answer model come from it.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Sequence

import numpy as np

from attrimem_jax.data import world
from attrimem_jax.data.world import ATTRIBUTES, COUNTED, EVENTS, Fact

ABSTAIN = "I do not know."


class Form(enum.StrEnum):
  """What is asked: a value, the day of an event, how many events of a kind, or which of two kinds came first."""

  VALUE = "value"
  WHEN = "when"
  COUNT = "count"
  FIRST = "first"


@dataclasses.dataclass(frozen=True)
class Query:
  """A question. `other` is the second kind of event of FIRST."""

  form: Form
  subject: str
  attribute: str
  other: str = ""


@dataclasses.dataclass(frozen=True)
class Reply:
  """A right answer: the bare value ("Lisbon"), the sentence ("Ann lives in Lisbon."), and indices of its facts."""

  bare: str
  sentence: str
  used: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Wording:
  form: Form
  attribute: str
  other: str
  template: str


def _infinitive(attribute: str) -> str:
  event = ATTRIBUTES[attribute].event
  assert event is not None, f"{attribute} is a state"
  return event.infinitive


@functools.cache
def _wordings(form: Form, attribute: str, other: str = "") -> tuple[_Wording, ...]:
  """Returns every wording of a kind of question."""
  event = ATTRIBUTES[attribute].event
  if form == Form.VALUE:
    plain = ATTRIBUTES[attribute].questions
    templates = plain if event else plain + tuple(text.replace("?", " now?") for text in plain)
  elif form == Form.WHEN:
    templates = (f"When did {{s}} {_infinitive(attribute)}?", f"On which day did {{s}} {_infinitive(attribute)}?")
  elif form == Form.COUNT:
    assert event is not None
    templates = (
      f"How many {event.many} did {{s}} {event.verb}?",
      f"What number of {event.many} did {{s}} {event.verb}?",
    )
  else:
    templates = (f"Did {{s}} {_infinitive(attribute)} or {_infinitive(other)} first?",)
  return tuple(_Wording(form, attribute, other, text) for text in templates)


@functools.cache
def _patterns() -> tuple[tuple[_Wording, re.Pattern[str]], ...]:
  wordings = [w for name in ATTRIBUTES for w in _wordings(Form.VALUE, name)]
  wordings += [w for name in EVENTS for w in _wordings(Form.WHEN, name)]
  wordings += [w for name in COUNTED for w in _wordings(Form.COUNT, name)]
  wordings += [w for a in EVENTS for b in EVENTS for w in _wordings(Form.FIRST, a, b)]
  return tuple((w, world.template_pattern(w.template)) for w in wordings)


def word(query: Query, rng: np.random.Generator, *, changed: bool = False) -> str:
  """Returns one wording of a query. Only a value that `changed` may be asked for with "now"."""
  wordings = _wordings(query.form, query.attribute, query.other)
  if query.form == Form.VALUE and not changed:
    wordings = wordings[: len(ATTRIBUTES[query.attribute].questions)]
  return world.pick(rng, wordings).template.format(s=query.subject)


@functools.lru_cache(maxsize=100_000)
def read(text: str) -> Query | None:
  """Returns the query that a question's text words, or None if it is no question of this world."""
  for wording, pattern in _patterns():
    found = pattern.fullmatch(text)
    if found:
      return Query(wording.form, found["s"], wording.attribute, wording.other)
  return None


def resolve(query: Query, facts: Sequence[tuple[Fact, str]]) -> Reply | None:
  """Answers a query from (fact, date) pairs in memory order, or returns None if they do not hold the answer.

  The latest date wins for a value, and of equal dates the last in order; a count is of all the facts of its kind; of
  several events of a kind the first in order is dated. A fact without a value ("") tells its day alone.
  """
  return {Form.VALUE: _value, Form.WHEN: _when, Form.COUNT: _count, Form.FIRST: _first}[query.form](query, facts)


def sentence(query: Query, facts: Sequence[tuple[Fact, str]]) -> str:
  """Returns the full-sentence answer, or `ABSTAIN`."""
  reply = resolve(query, facts)
  return ABSTAIN if reply is None else reply.sentence


def _matching(facts: Sequence[tuple[Fact, str]], subject: str, attribute: str, *, valued: bool) -> list[int]:
  return [i for i, (f, _) in enumerate(facts) if f.topic == (subject, attribute) and (f.value or not valued)]


def _value(query: Query, facts: Sequence[tuple[Fact, str]]) -> Reply | None:
  found = _matching(facts, query.subject, query.attribute, valued=True)
  if not found:
    return None
  latest = max(found, key=lambda i: (facts[i][1], i))
  fact = facts[latest][0]
  return Reply(fact.value, f"{world.record_text(fact)}.", (latest,))


def _when(query: Query, facts: Sequence[tuple[Fact, str]]) -> Reply | None:
  found = _matching(facts, query.subject, query.attribute, valued=False)
  if not found or not facts[found[0]][1]:
    return None
  date = facts[found[0]][1]
  return Reply(date, f"{query.subject} did so on {date}.", (found[0],))


def _count(query: Query, facts: Sequence[tuple[Fact, str]]) -> Reply | None:
  found = _matching(facts, query.subject, query.attribute, valued=True)
  if not found:
    return None
  event = ATTRIBUTES[query.attribute].event
  assert event is not None
  bare = f"{len(found)} {event.one if len(found) == 1 else event.many}"
  return Reply(bare, f"{query.subject} {event.past} {bare}.", tuple(found))


def _first(query: Query, facts: Sequence[tuple[Fact, str]]) -> Reply | None:
  one = _matching(facts, query.subject, query.attribute, valued=False)
  two = _matching(facts, query.subject, query.other, valued=False)
  if not one or not two:
    return None
  winner = min(one[0], two[0], key=lambda i: (facts[i][1], i))
  text = world.record_text(facts[winner][0])
  return Reply(text.split(" ", 1)[1], f"{text} first.", tuple(sorted((one[0], two[0]))))
