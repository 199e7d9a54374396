import numpy as np
import pytest

from attrimem_jax.attribution import scoring
from attrimem_jax.attribution.scoring import answer_logprobs, target
from attrimem_jax.nn import batching
from tests.attribution.tiny import MODEL, PREFIX, score
from tests.nn import oracle


def rows(count: int, seed: int = 0, longest: int = 40, answers: int = 9):
  rng = np.random.default_rng(seed)
  prompts = [rng.integers(0, 53, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]
  return prompts, [rng.integers(0, 53, rng.integers(1, answers + 1)).astype(np.int32) for _ in range(count)]


def test_scores_are_those_of_a_plain_decoder_row_by_row():
  prompts, answers = rows(9)
  scores = answer_logprobs(MODEL, PREFIX, prompts, answers)
  expected = [score(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
  np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
  assert scores.dtype == np.float32


def test_batches_never_change_a_score():
  prompts, answers = rows(12, seed=1)
  together = answer_logprobs(MODEL, PREFIX, prompts, answers)
  backwards = answer_logprobs(MODEL, PREFIX, prompts[::-1], answers[::-1], token_budget=400, step=16)[::-1]
  np.testing.assert_allclose(together, backwards, rtol=1e-5, atol=1e-5)
  for i in (0, 7):
    alone = answer_logprobs(MODEL, PREFIX, prompts[i : i + 1], answers[i : i + 1])
    np.testing.assert_allclose(alone[0], together[i], rtol=1e-5)


def test_one_token_more_costs_its_log_probability():
  prompt, answer = np.array([5, 6, 7]), np.array([9, 2, 30])
  whole, begun = answer_logprobs(MODEL, PREFIX, [prompt, prompt], [answer, answer[:2]])
  last = oracle.logprobs(MODEL.config, MODEL.params, [*PREFIX, *prompt, *answer[:2]], answer[2:])[0]
  np.testing.assert_allclose(whole - begun, last, rtol=1e-5)


@pytest.mark.parametrize(("few", "sizes"), [(32, (8, 32, 128)), (8, (2, 8, 32, 128))])
def test_batches_cover_every_row_once_and_fill_all_but_the_last(few, sizes):
  rng = np.random.default_rng(2)
  widths = [(8 * int(rng.integers(1, 4)), 16 * int(rng.integers(1, 9))) for _ in range(1000)]
  batches = list(batching.batches(widths, 16384, few))
  assert sorted(i for _, _, part in batches for i in part) == list(range(1000))
  for (answer_width, prompt_width), size, part in batches:
    assert size in sizes
    assert size == sizes[0] or size * (answer_width + prompt_width) <= 16384
    assert all(widths[i][0] <= answer_width and widths[i][1] <= prompt_width for i in part)
  assert sum(len(part) < size for _, size, part in batches) <= 1
  assert list(batching.batches([], 16384)) == []


def test_compilations_are_bounded_over_random_lengths():
  before = scoring._score_all._cache_size()
  for seed in range(20):
    # One answer width; prompts in two buckets of 16; at most the sizes 8 and 32.
    answer_logprobs(MODEL, PREFIX, *rows(int(np.random.default_rng(seed).integers(1, 70)), seed, longest=32, answers=8))
  assert scoring._score_all._cache_size() - before <= 4


def test_a_hundred_questions_of_random_lengths_share_few_programs():
  """Contexts in two buckets of 16, what follows them in one of 32: two programs for each kind of cached scoring."""
  scored, sloped = scoring._score_all._cache_size(), scoring._differentiate._cache_size()
  rng = np.random.default_rng(3)
  for _ in range(100):
    prefix, prompt, answer = (rng.integers(0, 53, rng.integers(1, most)) for most in (33, 17, 10))
    keep = rng.random((4, len(prefix))) < 0.5
    (scores,) = scoring.cached_logprobs(MODEL, [prefix], [(prompt, answer)], [keep])
    (again,), (slopes,) = scoring.cached_gradients(MODEL, [prefix], [(prompt, answer)], [keep.astype(np.float32)])
    np.testing.assert_allclose(again, scores, rtol=1e-4)
    assert slopes.shape == keep.shape
  assert scoring._score_all._cache_size() - scored <= 4  # the gradient's own call counts as well
  assert scoring._differentiate._cache_size() - sloped <= 2


def test_bad_rows():
  with pytest.raises(ValueError, match="row 1 has an empty answer"):
    answer_logprobs(MODEL, PREFIX, [[1], [2]], [[1], []])
  with pytest.raises(ValueError, match="row 0 has an empty prompt"):
    answer_logprobs(MODEL, PREFIX, [[]], [[1]])
  with pytest.raises(ValueError, match="row 0 has 65 tokens, tiny reads 64"):
    answer_logprobs(MODEL, PREFIX, [np.zeros(60, int)], [[1, 2]])
  assert answer_logprobs(MODEL, PREFIX, [], []).shape == (0,)


def test_target_by_hand():
  np.testing.assert_allclose(target(np.log([0.5, 0.75, 0.1])), [0, np.log(3), -np.log(9)], atol=1e-12)


def test_target_against_extended_precision():
  """Where 80-bit floats exist, the textbook formula in them is accurate enough to judge the stable one."""
  if np.finfo(np.longdouble).eps > 1e-18:
    pytest.skip("long double is not wider than double here")
  logp = -np.logspace(-6, 4, 2000)
  wide = logp.astype(np.longdouble)
  np.testing.assert_allclose(target(logp), (wide - np.log(-np.expm1(wide))).astype(float), rtol=1e-14, atol=1e-15)


def test_target_is_finite_and_rises():
  logp = np.array([-1e30, -1e4, -700.0, -1.0, -np.log(2), -1e-3, -1e-6, -1e-9, -0.0, 0.0, 1e-7], np.float32)
  values = target(logp)
  assert values.dtype == np.float64
  assert np.all(np.isfinite(values))
  assert np.all(np.diff(values) >= 0)
  np.testing.assert_allclose(values[-1], np.log(1e6), rtol=1e-6)
  np.testing.assert_allclose(values[2], -700)
