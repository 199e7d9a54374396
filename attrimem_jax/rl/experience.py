"""One step's experience: groups of rollouts with rewards, credit and advantages, and the training batch made of them.

    advantage of a token = outcome advantage of its rollout + lambda * process advantage of the token

Groups are handled one by one: the pool of process rewards, and every key of a call, is that of one group.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.attribution.attribute import Attribution
from attrimem_jax.attribution.credit import Credit, Unit, assign, by_unit
from attrimem_jax.nn.batching import pack
from attrimem_jax.rl import advantages as advantage
from attrimem_jax.rl.update import Batch
from attrimem_jax.rollout.answering import Answer
from attrimem_jax.rollout.writing import Call, Rollout
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """The G rollouts of one window, their answers and the score of each; `rewards` float64 [G] is the mean score."""

  rollouts: tuple[Rollout, ...]
  answers: tuple[tuple[Answer, ...], ...]
  scores: np.ndarray
  attributions: tuple[Attribution, ...] = ()

  @property
  def rewards(self) -> np.ndarray:
    """NaN where no question could be scored."""
    return self.scores.mean(axis=1) if self.scores.size else np.full(len(self.rollouts), np.nan)

  @property
  def flat(self) -> bool:
    """Whether there is no difference between the rewards to learn from, or no reward at all."""
    return advantage.flat(self.rewards, np.isfinite(self.rewards))


@dataclasses.dataclass(frozen=True)
class AdvantageSettings:
  """λ, the unit that shares credit, how process rewards are normalised, and the bound of a process advantage."""

  lambda_: float
  unit: Unit = Unit.TOKEN
  normalise: str = "zscore"
  clip: float = 5.0
  drop_flat: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Valued:
  """One call with the credit and the advantage of each of its tokens; `valid` False keeps it out of the loss."""

  call: Call
  credit: Credit
  outcome: float
  advantages: np.ndarray
  valid: bool


def value(group: Group, settings: AdvantageSettings, tokenizer: Tokenizer) -> list[Valued]:
  """Credit and advantages of all calls of a group.

  A malformed action has its tokens in the loss like any other: it earns the advantage of its rollout. A rollout whose
  reward could not be computed leaves the loss and the statistics.
  """
  rewards = group.rewards
  valid = np.isfinite(rewards)
  outcome = advantage.outcome_advantages(np.where(valid, rewards, 0.0)[None], valid[None])[0]
  if settings.drop_flat and not np.any(outcome):
    valid = np.zeros_like(valid)
  calls = [call for rollout in group.rollouts for call in rollout.calls]
  credit = _credit(group, settings, tokenizer, calls)
  flat_rewards = np.concatenate([credit[c.key].rewards for c in calls])
  is_source = np.concatenate([credit[c.key].is_source for c in calls])
  process = advantage.process_advantages(flat_rewards, is_source, normalise=settings.normalise, clip=settings.clip)
  cuts = np.cumsum([len(c.completion.ids) for c in calls])[:-1]
  valued = []
  for c, p in zip(calls, np.split(process, cuts), strict=True):
    g, mine = c.key.rollout, credit[c.key]
    tokens = advantage.combine(outcome[g], p, mine.is_source, settings.lambda_)
    valued.append(Valued(c, mine, outcome[g], tokens, valid[g]))
  return valued


def _credit(
  group: Group, settings: AdvantageSettings, tokenizer: Tokenizer, calls: Sequence[Call]
) -> dict[CallKey, Credit]:
  history = group.rollouts[0].window.history.id
  asked = {(history, g): len(answers) for g, answers in enumerate(group.answers)}
  credit = assign({c.key: len(c.completion.ids) for c in calls}, group.attributions, asked)
  return {c.key: by_unit(credit[c.key], settings.unit, c.actions, tokenizer.pieces(c.completion.ids)) for c in calls}


def training_batch(groups: Sequence[Sequence[Valued]], *, prefixes: int, width: int, step: int) -> Batch:
  """Packs valued calls on the shared-prefix layout: one prefix for each (window, session), its calls as suffixes.

  Args:
    groups: the calls of each window.
    prefixes: pads the batch to this many prefixes, a multiple of the micro-batches.
    width: columns of a completion.
    step: granularity of the other widths.
  """
  sessions: dict[tuple[int, int], list[Valued]] = {}
  for w, calls in enumerate(groups):
    for valued in calls:
      sessions.setdefault((w, valued.call.key.session), []).append(valued)
  rows = max(map(len, sessions.values()))
  packed = list(sessions.values())
  filler = prefixes - len(packed)
  assert filler >= 0, f"{len(packed)} sessions do not fit {prefixes} prefixes"
  shared = pack(
    [calls[0].call.prefix for calls in packed] + [packed[0][0].call.prefix[:1]] * filler,
    [[(v.call.prompt, v.call.completion.ids) for v in calls] for calls in packed] + [[]] * filler,
    completion_width=width,
    rows=rows,
    step=step,
  )
  arrays = {name: np.zeros((prefixes, rows, width), np.float32) for name in ("advantages", "sampler_logp")}
  loss_mask = np.zeros((prefixes, rows, width), bool)
  for p, calls in enumerate(packed):
    for i, v in enumerate(calls):
      length = len(v.call.completion.ids)
      arrays["advantages"][p, i, :length] = v.advantages
      arrays["sampler_logp"][p, i, :length] = v.call.completion.logps
      loss_mask[p, i, :length] = v.valid
  return Batch(shared=shared, loss_mask=loss_mask, **arrays)
