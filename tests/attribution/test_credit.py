import numpy as np
import pytest

from attrimem_jax.attribution.attribute import Attribution, Measurement, Problem
from attrimem_jax.attribution.credit import Credit, Unit, assign, by_unit
from attrimem_jax.memory.actions import Action, Op, Reason, parse
from attrimem_jax.memory.bank import Bank, apply_all
from attrimem_jax.memory.context import Context, Source, build
from attrimem_jax.types import CallKey, Finish, Module
from tests.memory.conftest import BY_BYTES, TOKENIZER

FIRST, SECOND = CallKey("h", 0, 0, Module.SEMANTIC), CallKey("h", 0, 1, Module.EPISODIC)
OTHER = CallKey("h", 1, 0, Module.SEMANTIC)


def attribution(sources, weights, context: Context | None = None) -> Attribution:
  empty = np.zeros(0, np.int32)
  ids, source = (context.ids, context.source) if context else (empty, empty)
  weights = np.asarray(weights, np.float32)
  problem = Problem(ids, source, tuple(sources), empty, (0,))
  return Attribution(
    problem,
    weights,
    0.0,
    0.0,
    Measurement(problem, np.zeros((0, len(weights)), bool), np.zeros(0)),
  )


def action(start: int, stop: int, reason: Reason = Reason.OK) -> Action:
  return Action(Op.ADD, (), "x", (), start, stop, reason, "ADD x", start, stop)


def test_mean_over_a_rollouts_questions_by_hand():
  asked = [
    attribution([Source(FIRST, 1), Source(FIRST, 2), Source(SECOND, 0)], [3.0, 0.0, -1.0]),
    attribution([Source(FIRST, 1)], [1.0]),
    attribution([Source(OTHER, 0)], [5.0]),
  ]
  # Two questions about rollout 0; one about rollout 1.
  credit = assign({FIRST: 4, SECOND: 2, OTHER: 1}, asked, {("h", 0): 2, ("h", 1): 1})
  np.testing.assert_allclose(credit[FIRST].rewards, [0, 2, 0, 0])
  np.testing.assert_allclose(credit[SECOND].rewards, [-0.5, 0])
  np.testing.assert_allclose(credit[OTHER].rewards, [5])
  assert credit[FIRST].is_source.tolist() == [False, True, True, False]
  assert credit[SECOND].is_source.tolist() == [True, False]
  assert credit[FIRST].rewards.dtype == np.float64


def test_tokens_that_make_up_one_source_share_its_credit():
  asked = attribution([Source(FIRST, 1, (0.25, 0.75)), Source(FIRST, 3)], [4.0, -1.0])
  credit = assign({FIRST: 5}, [asked], {("h", 0): 2})[FIRST]
  np.testing.assert_allclose(credit.rewards, [0, 0.5, 1.5, -0.5, 0])
  assert credit.is_source.tolist() == [False, True, True, True, False]


def test_a_question_that_did_not_read_a_token_gives_it_nothing():
  one = attribution([Source(FIRST, 0)], [6.0])
  for questions, reward in ((1, 6.0), (3, 2.0)):
    assert assign({FIRST: 1}, [one], {("h", 0): questions})[FIRST].rewards[0] == reward


def test_without_attributions_nothing_is_a_source():
  credit = assign({FIRST: 3, SECOND: 0}, [], {})
  assert not credit[FIRST].is_source.any()
  assert credit[SECOND].rewards.shape == (0,)


@pytest.mark.parametrize("position", [-1, 4])
def test_a_source_outside_of_its_call_is_no_silent_zero(position):
  with pytest.raises(AssertionError, match="lies outside of 4 tokens"):
    assign({FIRST: 4}, [attribution([Source(FIRST, position)], [1.0])], {("h", 0): 1})
  with pytest.raises(KeyError):
    assign({SECOND: 4}, [attribution([Source(FIRST, 0)], [1.0])], {("h", 0): 1})


PIECES = [b"ADD", b" tea", b",", b" Ann", b"\n", b"ADD", b" Bob", b"\n"]
TOKENS = Credit(np.array([0.0, 3, 1, 2, 0, 0, 7, 0]), np.array([0, 1, 1, 1, 0, 0, 1, 0], bool))
ACTIONS = [action(1, 4), action(6, 7)]


def test_units_by_hand():
  token, span, whole = (by_unit(TOKENS, unit, ACTIONS, PIECES) for unit in (Unit.TOKEN, Unit.SPAN, Unit.ACTION))
  np.testing.assert_allclose(token.rewards, [0, 3, 1, 2, 0, 0, 7, 0])
  np.testing.assert_allclose(span.rewards, [0, 2, 2, 2, 0, 0, 7, 0])
  np.testing.assert_allclose(whole.rewards, [0, *[6 / np.sqrt(3)] * 3, 0, 0, 7, 0])
  for shared in (token, span, whole):
    np.testing.assert_array_equal(shared.is_source, TOKENS.is_source)


def test_a_clause_ends_after_its_comma():
  pieces = [b"ADD", b" tea,", b" hot", b" Ann", b"\n", b"ADD", b" Bob", b"\n"]
  np.testing.assert_allclose(by_unit(TOKENS, Unit.SPAN, ACTIONS, pieces).rewards, [0, 3, 1.5, 1.5, 0, 0, 7, 0])


def test_no_unit_means_no_process_reward():
  none = by_unit(TOKENS, Unit.NONE, ACTIONS, PIECES)
  assert not none.rewards.any()
  assert not none.is_source.any()
  assert TOKENS.rewards.any(), "the credit handed in stays as it was"


def test_rejected_actions_and_tokens_that_no_context_held_share_nothing():
  credit = Credit(np.array([0.0, 4, 0, 2]), np.array([0, 1, 0, 1], bool))
  whole = by_unit(credit, Unit.ACTION, [action(1, 3), action(3, 4, Reason.DUPLICATE)], [b"a"] * 4)
  np.testing.assert_allclose(whole.rewards, [0, 4, 0, 2])
  assert not whole.is_source[2]


def completion(rng: np.random.Generator) -> list[int]:
  """Lines of actions, good and bad, from tokens that a policy might sample, some of them across borders."""
  pieces = (" tea", " Ann", " Bob", " lives", ".\n", "\n", "n.\nSKIP", "\nADD", "ADD", "SKIP", " #", "2024")
  return [BY_BYTES[piece.encode()] for piece in ("ADD", *rng.choice(pieces, 25))]


def test_every_source_maps_to_exactly_one_token_of_one_call():
  """From policy output to bank to context to credit: a weight arrives at the token that wrote the id, nowhere else."""
  for seed in range(20):
    rng = np.random.default_rng(seed)
    completions, bank = {}, Bank.empty()
    for session in range(3):
      for module in (Module.EPISODIC, Module.SEMANTIC):
        key = CallKey("h", 0, session, module)
        completions[key] = completion(rng)
        actions = parse(completions[key], TOKENIZER, module, Finish.STOP)
        bank, _ = apply_all(bank, actions, module=module, date=f"2024-03-0{session + 1}", owner=key)
    context = build(TOKENIZER, bank.current(), ("h", 0))
    weights = 1.0 + np.arange(len(context.sources))  # all different, so that no two tokens can be taken for each other
    lengths = {key: len(ids) for key, ids in completions.items()}
    credit = assign(lengths, [attribution(context.sources, weights, context)], {("h", 0): 1})
    assert len(set(context.sources)) == len(context.sources) > 0
    assert sum(c.is_source.sum() for c in credit.values()) == len(context.sources)
    for token, source in zip(context.ids, context.source, strict=True):
      if source >= 0:
        owner, position = context.sources[source].owner, context.sources[source].position
        assert completions[owner][position] == token
        assert credit[owner].rewards[position] == weights[source]
    assert all(np.all(c.rewards[~c.is_source] == 0) for c in credit.values())
