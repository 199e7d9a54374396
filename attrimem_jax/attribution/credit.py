"""From weights of sources to rewards of the tokens that the policy wrote.

A source is one position of one call, so credit goes back by index, never by text. A rollout's reward of a token is the
mean of its weights over the questions that were asked about the rollout; where a question's context did not hold the
token, the question gives it 0. A token that stood in no context is no source: it has no process reward at all.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

from attrimem_jax.attribution.attribute import Attribution
from attrimem_jax.memory.actions import Action, Reason
from attrimem_jax.types import CallKey


class Unit(enum.StrEnum):
  """What shares one reward: a token alone, the words of a clause, all tokens of an action, or nothing."""

  TOKEN = "token"
  SPAN = "span"
  ACTION = "action"
  NONE = "none"


@dataclasses.dataclass(frozen=True, eq=False)
class Credit:
  """Process rewards of one call: rewards float64 [T], and is_source bool [T], for the T tokens of its completion."""

  rewards: np.ndarray
  is_source: np.ndarray


def assign(
  lengths: Mapping[CallKey, int],
  attributions: Sequence[Attribution],
  questions: Mapping[tuple[str, int], int],
) -> dict[CallKey, Credit]:
  """Token credit of every call.

  Args:
    lengths: tokens of each call's completion.
    attributions: of any number of questions about any of the rollouts.
    questions: how many questions were asked about each (history, rollout).

  A source that belongs to no call of `lengths`, or to no position of it, is a programmer error (KeyError, assert).
  """
  credit = {key: Credit(np.zeros(n), np.zeros(n, bool)) for key, n in lengths.items()}
  for attribution in attributions:
    for source, weight in zip(attribution.problem.sources, attribution.weights, strict=True):
      call = credit[source.owner]
      span = slice(source.position, source.position + len(source.shares))
      assert 0 <= span.start < span.stop <= len(call.rewards), f"{source} lies outside of {len(call.rewards)} tokens"
      asked = questions[source.owner.history, source.owner.rollout]
      call.rewards[span] += weight / asked * np.array(source.shares)
      call.is_source[span] = True
  return credit


def by_unit(credit: Credit, unit: Unit, actions: Sequence[Action], pieces: Sequence[bytes]) -> Credit:
  """Shares credit within units.

  Args:
    credit: token credit of one call.
    unit: TOKEN leaves it as it is; SPAN gives the sources of a clause their mean; ACTION gives all sources of an action
      the sum of its token credit over the square root of its number of sources (AttriMem v1); NONE removes all of it.
    actions: what the call's completion was parsed into.
    pieces: bytes of each token of the completion, in which SPAN finds the clauses.
  """
  if unit is Unit.TOKEN:
    return credit
  if unit is Unit.NONE:
    return Credit(np.zeros_like(credit.rewards), np.zeros_like(credit.is_source))
  rewards = credit.rewards.copy()
  for start, stop in _units(unit, actions, pieces):
    places = start + np.flatnonzero(credit.is_source[start:stop])
    if len(places):
      divisor = len(places) if unit is Unit.SPAN else np.sqrt(len(places))
      rewards[places] = credit.rewards[places].sum() / divisor
  return Credit(rewards, credit.is_source)


def _units(unit: Unit, actions: Sequence[Action], pieces: Sequence[bytes]) -> list[tuple[int, int]]:
  """Token ranges that share a reward; a clause ends after a token that holds a comma, semicolon, colon or stop."""
  texts = [(a.start, a.stop) for a in actions if a.reason == Reason.OK and a.stop > a.start]
  if unit is Unit.ACTION:
    return texts
  spans = []
  for start, stop in texts:
    cuts = [t + 1 for t in range(start, stop - 1) if pieces[t].rstrip()[-1:] in (b",", b";", b":", b".", b"|")]
    spans += list(zip([start, *cuts], [*cuts, stop], strict=True))
  return spans
