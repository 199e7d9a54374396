"""From rollouts to a training batch, on groups small enough to be worked out by hand."""

import dataclasses

import numpy as np
import pytest

from attrimem_jax.attribution.attribute import Attribution, Measurement, Problem
from attrimem_jax.attribution.credit import Unit
from attrimem_jax.memory import bank as banks
from attrimem_jax.memory.actions import Reason, parse
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import Source, build
from attrimem_jax.rl.experience import AdvantageSettings, Group, Valued, training_batch, value
from attrimem_jax.rollout.sampling import Completion
from attrimem_jax.rollout.writing import Call, Rollout, Window
from attrimem_jax.types import CallKey, Finish, History, Module, Session, Turn
from tests.memory.conftest import BY_BYTES, TOKENIZER

SEMANTIC, EPISODIC = Module.SEMANTIC, Module.EPISODIC
HISTORY = History("h", tuple(Session(f"s{i}", "2024-03-04", (Turn("Ann", "tea", f"t{i}"),)) for i in range(2)))
WINDOW = Window(HISTORY, 0, 0, 2)
STOP = TOKENIZER.stop_ids[0]
ADD = [BY_BYTES[b] for b in (b"ADD", b" Ann", b" tea")] + [STOP]  # " Ann" and " tea" are sources 1 and 2
NONSENSE = [BY_BYTES[b] for b in (b" Bob", b" tea")] + [STOP]
SETTINGS = AdvantageSettings(lambda_=0.5, normalise="none")


def call(rollout: int, ids=ADD, session: int = 0, module: Module = SEMANTIC, history: str = "h") -> Call:
  key = CallKey(history, rollout, session, module)
  ids = np.array(ids, np.int32)
  completion = Completion(ids, -np.arange(1, len(ids) + 1, dtype=np.float32) - 10 * rollout, Finish.STOP)
  prompt = [20 + rollout] * (rollout + 1)
  return Call(key, [60 + session, 61], prompt, completion, parse(ids, TOKENIZER, module, Finish.STOP))


def rollout(index: int, *calls: Call) -> Rollout:
  return Rollout(WINDOW, index, calls, Bank.empty())


def attribution(weights: dict[Source, float]) -> Attribution:
  """Of one question about one rollout; only the sources and their weights are ever read."""
  empty = np.zeros(0, np.int32)
  problem = Problem(empty, empty, tuple(weights), empty, ())
  return Attribution(
    problem, np.array(list(weights.values()), np.float32), 0.0, 0.0, Measurement(problem, empty, empty)
  )


def source(rollout: int, position: int, session: int = 0, module: Module = SEMANTIC) -> Source:
  return Source(CallKey("h", rollout, session, module), position)


def group(scores, calls: list[list[Call]], attributions=(), questions: int = 2) -> Group:
  rollouts = tuple(rollout(i, *c) for i, c in enumerate(calls))
  answers = tuple((None,) * questions for _ in calls)
  return Group(rollouts, answers, np.array(scores, np.float64), tuple(attributions))


def two(scores=((1.0, 1.0), (0.0, 1.0)), attributions=None, second=ADD) -> Group:
  """Rewards 1 and 1/2: outcome advantages +1 and -1."""
  if attributions is None:
    attributions = (attribution({source(0, 1): 3.0, source(0, 2): 1.0}), attribution({source(0, 2): -2.0}))
  return group(scores, [[call(0)], [call(1, second)]], attributions)


def test_outcome_and_process_by_hand():
  """Token 1: 3/2 over two questions. Token 2: (1 - 2)/2. Both times λ = 0.5, on top of +1; no source, no process."""
  first, second = value(two(), SETTINGS, TOKENIZER)
  assert (first.outcome, second.outcome) == (1.0, -1.0)
  np.testing.assert_allclose(first.advantages, [1, 1 + 0.75, 1 - 0.25, 1])
  np.testing.assert_allclose(second.advantages, [-1, -1, -1, -1])
  np.testing.assert_array_equal(first.credit.is_source, [False, True, True, False])
  assert first.valid
  assert second.valid


def test_normalised_process_rewards_form_one_pool_of_a_group():
  """Rewards 1.5 and -0.5 of the first, 0.5 of the second rollout: mean 0.5, population deviation sqrt(2/3)."""
  scored = two(
    attributions=(
      attribution({source(0, 1): 3.0, source(0, 2): 1.0}),
      attribution({source(0, 2): -2.0}),
      attribution({source(1, 1): 1.0}),
    )
  )
  first, second = value(scored, dataclasses.replace(SETTINGS, normalise="zscore"), TOKENIZER)
  z = 1 / np.sqrt(2 / 3)
  np.testing.assert_allclose(first.advantages, [1, 1 + 0.5 * z, 1 - 0.5 * z, 1])
  np.testing.assert_allclose(second.advantages, [-1, -1, -1, -1])


def test_the_unit_and_lambda_are_those_of_the_settings():
  action, _ = value(two(), dataclasses.replace(SETTINGS, unit=Unit.ACTION), TOKENIZER)
  np.testing.assert_allclose(action.advantages, [1, *[1 + 0.5 / np.sqrt(2)] * 2, 1])
  nothing, _ = value(two(), dataclasses.replace(SETTINGS, unit=Unit.NONE), TOKENIZER)
  np.testing.assert_allclose(nothing.advantages, 1)
  outcome_only, _ = value(two(), dataclasses.replace(SETTINGS, lambda_=0.0), TOKENIZER)
  np.testing.assert_allclose(outcome_only.advantages, 1)


def test_a_flat_group_has_no_outcome_and_keeps_its_process_rewards():
  flat = two(scores=((0.7, 0.7), (0.7, 0.7)))
  first, second = value(flat, SETTINGS, TOKENIZER)
  np.testing.assert_allclose(first.advantages, [0, 0.75, -0.25, 0])
  assert not second.advantages.any()
  assert not any(v.valid for v in value(flat, dataclasses.replace(SETTINGS, drop_flat=True), TOKENIZER))


def test_a_rollout_without_a_reward_leaves_loss_and_statistics():
  scores = ((1.0, 1.0), (0.0, 0.0), (np.nan, 1.0))
  valued = value(group(scores, [[call(0)], [call(1)], [call(2)]]), SETTINGS, TOKENIZER)
  assert [v.valid for v in valued] == [True, True, False]
  assert [v.outcome for v in valued] == [1.0, -1.0, 0.0], "as without the third"
  assert all(np.isfinite(v.advantages).all() for v in valued)
  mask = training_batch([valued], prefixes=1, width=8, step=8).loss_mask
  np.testing.assert_array_equal(mask.sum(-1), [[4, 4, 0]])


def test_no_questions_teach_nothing():
  silent = Group((rollout(0, call(0)), rollout(1, call(1))), ((), ()), np.zeros((2, 0)))
  assert np.isnan(silent.rewards).all()
  assert not any(v.valid or v.advantages.any() for v in value(silent, SETTINGS, TOKENIZER))


def test_a_malformed_action_earns_what_its_rollout_earns():
  _, malformed = value(two(second=NONSENSE), SETTINGS, TOKENIZER)
  assert [a.reason for a in malformed.call.actions] == [Reason.NOT_AN_ACTION]
  assert malformed.valid
  np.testing.assert_allclose(malformed.advantages, [-1, -1, -1])
  batch = training_batch([[malformed]], prefixes=1, width=4, step=8)
  np.testing.assert_array_equal(batch.loss_mask[0, 0], [True, True, True, False])


def test_every_source_is_one_token_of_one_call():
  """Two rollouts write the same words in two sessions and modules: equal text, different owners."""
  calls = [call(g, session=s, module=m) for g in range(2) for s in range(2) for m in (EPISODIC, SEMANTIC)]
  found: list[Source] = []
  for g in range(2):
    bank = Bank.empty()
    for c in calls:
      if c.key.rollout == g:
        bank, _ = banks.apply_all(bank, c.actions, module=c.key.module, date="", owner=c.key, core_budget=None)
    context = build(TOKENIZER, bank.current(), ("h", g))
    assert all(s.owner.rollout == g for s in context.sources)
    for token, place in zip(context.ids, context.source, strict=True):
      if place >= 0:
        (owner,) = [c for c in calls if c.key == context.sources[place].owner]
        assert owner.completion.ids[context.sources[place].position] == token
    found += context.sources
  assert len(found) == len(set(found)) >= 2 * 2 * 2
  weights = {s: float(i + 1) for i, s in enumerate(found)}
  per_rollout = [attribution({s: w for s, w in weights.items() if s.owner.rollout == g}) for g in range(2)]
  scored = group([[1.0], [1.0]], [calls[:4], calls[4:]], per_rollout, questions=1)
  valued = {v.call.key: v for v in value(scored, SETTINGS, TOKENIZER)}
  for key, v in valued.items():
    expected = [weights.get(Source(key, position), 0.0) for position in range(len(ADD))]
    np.testing.assert_allclose(v.advantages, 0.5 * np.array(expected))
    np.testing.assert_array_equal(v.credit.is_source, np.array(expected) > 0)


def test_a_source_without_a_call_is_an_error():
  with pytest.raises(KeyError):
    value(two(attributions=(attribution({source(0, 1, session=1): 1.0}),)), SETTINGS, TOKENIZER)


def valued(c: Call, start: float, valid: bool = True) -> Valued:
  return Valued(c, None, 0.0, start + np.arange(len(c.completion.ids)), valid)


def test_each_number_stands_at_its_token():
  """One prefix for each (window, session), completions from the same column on, prompts right before them."""
  groups = [
    [valued(call(0), 1.0), valued(call(1, NONSENSE), 11.0), valued(call(0, session=1), 21.0, valid=False)],
    [valued(call(0, NONSENSE, history="g"), 31.0)],
  ]
  batch = training_batch(groups, prefixes=4, width=5, step=4)
  np.testing.assert_array_equal(batch.shared.prefix[:, :2], [[60, 61], [61, 61], [60, 61], [60, 0]])
  assert batch.shared.suffix.shape == (4, 2, 4 + 5)
  np.testing.assert_array_equal(batch.shared.suffix[0], [[0, 0, 0, 20, *ADD, 0], [0, 0, 21, 21, *NONSENSE, 0, 0]])
  np.testing.assert_array_equal(batch.shared.suffix_mask[..., 4:].sum(-1), [[4, 3], [4, 0], [3, 0], [0, 0]])
  np.testing.assert_array_equal(batch.loss_mask.sum(-1), [[4, 3], [0, 0], [3, 0], [0, 0]])
  np.testing.assert_array_equal(batch.advantages[0], [[1, 2, 3, 4, 0], [11, 12, 13, 0, 0]])
  np.testing.assert_array_equal(batch.advantages[2, 0], [31, 32, 33, 0, 0])
  np.testing.assert_array_equal(batch.sampler_logp[0], [[-1, -2, -3, -4, 0], [-11, -12, -13, 0, 0]])
  assert not (batch.loss_mask & ~batch.shared.suffix_mask[..., 4:]).any()
  assert batch.advantages.dtype == batch.sampler_logp.dtype == np.float32


def test_more_sessions_than_prefixes_are_a_mistake():
  with pytest.raises(AssertionError, match="2 sessions do not fit 1 prefixes"):
    training_batch([[valued(call(0), 0.0), valued(call(0, session=1), 0.0)]], prefixes=1, width=4, step=4)
