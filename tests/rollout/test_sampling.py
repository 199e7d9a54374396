"""Sampling: what is drawn, with which probability, and that neither batch nor shape has a say in it."""

import functools
import itertools
import types

import jax
import numpy as np
import pytest

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.rollout import sampling
from attrimem_jax.rollout.sampling import Completion, Sampling, _begin, _invert, complete
from attrimem_jax.types import Finish
from tests.nn import oracle

STOP = (3, 17, 28, 40)
CONFIG = DecoderConfig(53, 16, 2, 4, 2, 6, 24, rope_theta=1e4, max_positions=128)
PREFIXES = ([5, 9, 0, 31], [7])
PROMPTS = ([[3, 8], [11], [2, 2, 50]], [[2, 0, 50, 13, 4]])


def model_of(config: DecoderConfig, stop: tuple[int, ...] = STOP, seed: int = 0, scale: float = 1.0):
  params = jax.tree.map(lambda a: a * np.float32(scale), oracle.draw(config, seed))
  return types.SimpleNamespace(
    name="tiny", config=config, params=params, tokenizer=types.SimpleNamespace(stop_ids=stop)
  )


@pytest.fixture(scope="module")
def model():
  """Flat enough that every draw is a choice."""
  return model_of(CONFIG, scale=0.6)


def keys_of(rows: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(2**32, size=(len(PREFIXES), rows, 2), dtype=np.uint32)


def sample(model, sampling: Sampling, keys: np.ndarray | None = None, **options) -> list[list[Completion]]:
  keys = keys_of(3) if keys is None else keys
  return complete(model, PREFIXES, PROMPTS, keys, sampling, rows=3, step=8, **options)


def rows_of(sampled: list[list[Completion]]) -> list[tuple[list[int], Completion]]:
  """(prefix and prompt, completion) of each row."""
  return [
    ([*PREFIXES[p], *PROMPTS[p][i]], completion)
    for p, group in enumerate(sampled)
    for i, completion in enumerate(group)
  ]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_those_of_the_trainer_and_of_a_plain_decoder(model, temperature):
  sampled = sample(model, Sampling(8, temperature))
  batch = pack(
    PREFIXES,
    [[(p, c.ids) for p, c in zip(*pair, strict=True)] for pair in zip(PROMPTS, sampled, strict=True)],
    completion_width=8,
    step=8,
  )
  trained = jax.jit(functools.partial(decoder.token_logprobs, CONFIG, count=8))
  logp = trained(model.params, batch, temperature=temperature)[0]
  for p, group in enumerate(sampled):
    for i, completion in enumerate(group):
      np.testing.assert_allclose(completion.logps, logp[p, i, : len(completion.ids)], atol=1e-5)
  for before, completion in rows_of(sampled):
    plain = oracle.logprobs(CONFIG, model.params, before, completion.ids, temperature)
    np.testing.assert_allclose(completion.logps, plain, atol=1e-5)


def test_temperature_zero_takes_the_likeliest(model):
  for before, completion in rows_of(sample(model, Sampling(8, 0.0))):
    ids = [*before, *completion.ids]
    z = oracle.logits(CONFIG, model.params, ids)[len(before) - 1 : -1]
    np.testing.assert_array_equal(completion.ids, z.argmax(-1))
    np.testing.assert_allclose(completion.logps, oracle.log_softmax(z).max(-1), atol=1e-5)
  first, second = (sample(model, Sampling(8, 0.0), keys_of(3, seed)) for seed in (1, 2))
  assert all(np.array_equal(a.ids, b.ids) for (_, a), (_, b) in zip(rows_of(first), rows_of(second), strict=True))


def test_a_rows_draw_does_not_depend_on_its_batch(model):
  keys = keys_of(3)
  together = sample(model, Sampling(8), keys)
  (alone,) = complete(model, PREFIXES[:1], [PROMPTS[0][2:]], keys[:1, 2:], Sampling(8), step=16)
  np.testing.assert_array_equal(alone[0].ids, together[0][2].ids)
  np.testing.assert_allclose(alone[0].logps, together[0][2].logps, atol=1e-5)
  other = keys.copy()
  other[0, 2] += 1
  changed = sample(model, Sampling(8), other)
  assert [np.array_equal(a.ids, b.ids) for (_, a), (_, b) in zip(rows_of(together), rows_of(changed), strict=True)] == [
    True,
    True,
    False,
    True,
  ]


def test_a_longer_limit_goes_on_where_the_shorter_one_stopped(model):
  for (_, short), (_, long) in zip(
    rows_of(sample(model, Sampling(3))), rows_of(sample(model, Sampling(8))), strict=True
  ):
    assert len(short.ids) <= 3
    np.testing.assert_array_equal(short.ids, long.ids[:3])
    np.testing.assert_array_equal(short.logps, long.logps[:3])


def test_a_stop_token_ends_a_row_and_is_kept(model):
  finished = [c for seed in range(8) for _, c in rows_of(sample(model, Sampling(8), keys_of(3, seed)))]
  assert {c.finish for c in finished} == {Finish.STOP, Finish.LENGTH}
  for c in finished:
    stops = np.isin(c.ids, STOP)
    assert not stops[:-1].any()
    assert stops[-1] == (c.finish == Finish.STOP)
    assert len(c.ids) == len(c.logps) == 8 or c.finish == Finish.STOP
    assert (c.ids.dtype, c.logps.dtype) == (np.int32, np.float32)
  assert len({len(c.ids) for c in finished if c.finish == Finish.STOP}) > 3


def test_a_stop_token_as_the_last_one_allowed_is_a_stop(model):
  once = [c for seed in range(8) for _, c in rows_of(sample(model, Sampling(1), keys_of(3, seed)))]
  assert {c.finish for c in once} == {Finish.STOP, Finish.LENGTH}
  assert all((c.ids[0] in STOP) == (c.finish == Finish.STOP) for c in once)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.4)])
def test_narrowed_choices_report_the_full_distribution(model, top_k, top_p):
  sampled = [
    row for seed in range(4) for row in rows_of(sample(model, Sampling(8, 1.0, top_k, top_p), keys_of(3, seed)))
  ]
  ranks = []
  for before, completion in sampled:
    table = oracle.log_softmax(oracle.logits(CONFIG, model.params, [*before, *completion.ids])[len(before) - 1 : -1])
    for row, token, logp in zip(table, completion.ids, completion.logps, strict=True):
      np.testing.assert_allclose(logp, row[token], atol=1e-5)
      likelier = row[row > row[token]]
      ranks.append(len(likelier))
      assert np.exp(likelier).sum() < top_p + 1e-6
      assert not top_k or len(likelier) < top_k
  assert max(ranks) > 0, "more than the likeliest token was drawn"


def test_frequencies_are_the_softmax():
  config = DecoderConfig(11, 8, 1, 2, 1, 4, 8, rope_theta=1e4)
  model, rows, temperature = model_of(config, (10,), 5), 4096, 1.3
  keys = np.random.default_rng(1).integers(2**32, size=(1, rows, 2), dtype=np.uint32)
  (sampled,) = complete(model, [[1, 2]], [[[3]] * rows], keys, Sampling(1, temperature), step=4)
  counts = np.bincount([c.ids[0] for c in sampled], minlength=11)
  expected = rows * np.exp(oracle.log_softmax(oracle.logits(config, model.params, [1, 2, 3])[-1] / temperature))
  assert expected.min() > 5, "each cell of the chi-square test is filled"
  assert np.sum((counts - expected) ** 2 / expected) < 23.2  # the 99th percentile with 10 degrees of freedom


@pytest.mark.parametrize("words", [1, 255, 256, 700, 3000])
def test_a_uniform_number_becomes_the_word_of_a_plain_search(words):
  """Against cumulative sums in float64; a draw within rounding of a border may take the neighbour that has weight."""
  rng = np.random.default_rng(words)
  weights = (rng.exponential(size=(50, words)) * (rng.random((50, words)) < 0.3)).astype(np.float32)
  weights[:, rng.integers(words)] = 1e-3
  u = np.concatenate([[0.0, 0.0, 1 - 2**-23, 1 - 2**-23], rng.random(46)]).astype(np.float32)
  found = np.asarray(jax.jit(_invert)(weights, u))
  upto = np.cumsum(weights.astype(np.float64), axis=-1)
  share, rows = upto / upto[:, -1:], np.arange(50)
  assert (weights[rows, found] > 0).all()
  assert (share[rows, found] > u - 1e-6).all()
  assert (np.where(found > 0, share[rows, found - 1], 0.0) <= u + 1e-6).all()
  plain = np.array([np.searchsorted(row, x, side="right") for row, x in zip(share, u, strict=True)])
  assert np.mean(found == plain) > 0.9


def test_compilations_are_bounded():
  """Twenty random lengths of prefix, prompt and completion meet two widths of each of the first two."""
  config = DecoderConfig(11, 8, 1, 2, 1, 4, 8, rope_theta=1e4)
  model, rng, before = model_of(config, (10,)), np.random.default_rng(0), _begin._cache_size()
  for _ in range(20):
    prefix, prompt, new = rng.integers(1, 65), rng.integers(1, 65), rng.integers(1, 9)
    keys = np.zeros((1, 1, 2), np.uint32)
    complete(model, [[1] * prefix], [[[2] * prompt]], keys, Sampling(int(new), rng.random()), rows=2, step=32)
  assert 1 < _begin._cache_size() - before <= 4


def test_stages_change_nothing_but_the_size_of_the_batch(model, monkeypatch):
  """Rows that stop at different times, sampled in stages of 2, 4, 8, 16 and 24 tokens, and in one."""
  keys = np.random.default_rng(7).integers(2**32, size=(2, 8, 2), dtype=np.uint32)
  prompts = [PROMPTS[0][:1] * 8, PROMPTS[1] * 5]

  def run():
    return complete(model, PREFIXES, prompts, keys, Sampling(20), rows=8, step=8)

  whole = run()
  widths, go_on = [], sampling._go_on

  def spied(*arguments):
    widths.append(arguments[5].ids.shape[:0:-1])
    return go_on(*arguments)

  monkeypatch.setattr(sampling, "FIRST_ROOM", 2)
  monkeypatch.setattr(sampling, "_go_on", spied)
  for a, b in zip(itertools.chain(*whole), itertools.chain(*run()), strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
    assert a.finish == b.finish
  longest = [sorted((len(c.ids) - (c.finish == Finish.STOP) for c in group), reverse=True) for group in whole]
  live = [max(sum(length >= stage for length in group) for group in longest) for stage in (2, 4, 8, 16)]
  assert [width for width, _ in widths] == [4, 8, 16, 24][: len(widths)]
  assert len(widths) >= 3
  for (_, rows), alive in zip(widths, live, strict=False):
    assert alive <= rows <= max(1, 2 * alive)
  assert widths[-1][1] < 8


@pytest.mark.parametrize(("at_once", "room"), [(1, 4), (3, 128), (4, 2), (8, 8)])
def test_a_queue_changes_nothing_but_how_many_are_under_way(model, monkeypatch, at_once, room):
  """Thirteen rows of one prefix and five of another, of 1 to 20 tokens, through a few places."""
  keys = np.random.default_rng(11).integers(2**32, size=(2, 13, 2), dtype=np.uint32)
  prompts = [[*PROMPTS[0], *PROMPTS[0], PROMPTS[1][0]][:7] * 2, PROMPTS[1] * 5]
  prompts[0] = prompts[0][:13]
  whole = complete(model, PREFIXES, prompts, keys, Sampling(20), rows=13, step=8)
  batches, entered = [], []
  for name, kept, place in (("_go_on", batches, 5), ("_enter", entered, 4)):
    was = getattr(sampling, name)

    def spied(*arguments, was=was, kept=kept, place=place):
      kept.append(arguments[place])
      return was(*arguments)

    monkeypatch.setattr(sampling, name, spied)
  monkeypatch.setattr(sampling, "FIRST_ROOM", room)
  queued = complete(model, PREFIXES, prompts, keys, Sampling(20), rows=13, step=8, at_once=at_once)
  lengths = [len(c.ids) for group in whole for c in group]
  assert min(lengths) < 5 < 15 < max(lengths)
  for a, b in zip(itertools.chain(*whole), itertools.chain(*queued), strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
    assert a.finish == b.finish
  assert {ids.shape[1] <= at_once for ids in (progress.ids for progress in batches)} == {True}
  assert sum(len(ids[0]) for ids in entered) >= 13 - at_once


def test_a_watcher_sees_what_is_sampled_changes_no_draw_and_ends_rows(monkeypatch):
  monkeypatch.setattr(sampling, "WATCHED", 5)
  model, keys = model_of(CONFIG, stop=(99,), scale=0.6), keys_of(3, seed=4)

  def run(**options):
    return complete(model, PREFIXES, PROMPTS, keys, Sampling(14), rows=4, step=8, **options)

  seen, whole = [], run()

  def watch(told):
    seen.append(told)
    return np.zeros((2, 3), bool)

  for a, b in zip(rows_of(whole), rows_of(run(watch=watch)), strict=True):
    np.testing.assert_array_equal(a[1].ids, b[1].ids)
  assert len(seen) == 3  # after 5, 10 and 14 tokens
  for look, told in enumerate(seen, 1):
    for (_, completion), ids in zip(rows_of(whole), itertools.chain(*told), strict=True):
      np.testing.assert_array_equal(ids, completion.ids[: 5 * look])

  def end_the_second(told):
    return np.array([[False, len(told[0][1]) >= 6, False], [False, True, True]])

  ended = run(at_once=2, watch=end_the_second)
  assert [[len(c.ids) for c in group] for group in ended] == [[14, 10, 14], [14]]
  for a, b in zip(rows_of(whole), rows_of(ended), strict=True):
    np.testing.assert_array_equal(a[1].ids[: len(b[1].ids)], b[1].ids)


def test_another_top_p_is_no_other_program(model):
  sample(model, Sampling(8, 1.0, top_p=0.5))
  before = _begin._cache_size()
  sample(model, Sampling(8, 1.0, top_p=0.8))
  assert _begin._cache_size() == before


def test_prompts_beyond_the_models_positions_are_refused(model):
  with pytest.raises(ValueError, match="exceeds the 128 positions of tiny"):
    complete(model, [[1] * 100], [[[2] * 20]], np.zeros((1, 1, 2), np.uint32), Sampling(9))


def test_a_prefix_without_prompts_is_padding(model):
  keys = keys_of(3)
  with_padding = complete(model, PREFIXES, [PROMPTS[0], []], keys, Sampling(8), rows=3, step=8)
  assert with_padding[1] == []
  for a, b in zip(with_padding[0], sample(model, Sampling(8), keys)[0], strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
