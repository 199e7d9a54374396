import dataclasses
import itertools

import numpy as np
import pytest

from attrimem_jax.attribution import attribute
from attrimem_jax.attribution.ablations import LEVELS
from attrimem_jax.attribution.attribute import Measurement, Problem, fit, judge, measure, part_of
from attrimem_jax.attribution.scoring import Scorer, target
from attrimem_jax.memory.context import Source
from attrimem_jax.types import CallKey, Module
from tests.attribution.tiny import MODEL, PREFIX, score
from tests.nn import oracle

OWNER = CallKey("h", 0, 0, Module.SEMANTIC)


def problem(sources: int, seed: tuple[int, ...] = (0, 1, 2)) -> Problem:
  """A prompt of two template ids, the sources, two template ids."""
  rng = np.random.default_rng(seed)
  source = np.array([-1, -1, *range(sources), -1, -1], np.int32)
  return Problem(
    rng.integers(0, 53, len(source)).astype(np.int32),
    source,
    tuple(Source(OWNER, i) for i in range(sources)),
    rng.integers(0, 53, 3).astype(np.int32),
    seed,
  )


def logps(targets: np.ndarray) -> np.ndarray:
  """Log-probabilities with these logits."""
  return -np.log1p(np.exp(-targets))


def test_measures_score_what_is_left_when_sources_are_removed_by_hand():
  one = problem(5)
  (measured,) = measure(MODEL, PREFIX, [one], 6)
  for mask, value in zip(measured.masks, measured.logp, strict=True):
    left = [i for i, s in zip(one.prompt, one.source, strict=True) if s < 0 or mask[s]]
    np.testing.assert_allclose(value, score(left, one.answer), rtol=1e-5, atol=1e-5)


def hiding(one: Problem, mask: np.ndarray, readers: slice) -> float:
  """The answer's log-probability with sources hidden (or faint, as `mask` says) from the tokens `readers`."""
  ids = [*PREFIX, *one.prompt, *one.answer]
  stays = np.array([1.0] * len(PREFIX) + [mask[s] if s >= 0 else 1.0 for s in one.source] + [1.0] * len(one.answer))
  visible = np.ones((len(ids), len(ids)))
  visible[readers] = stays
  visible[np.eye(len(ids), dtype=bool)] = 1
  before = len(ids) - len(one.answer)
  return float(oracle.logprobs(MODEL.config, MODEL.params, ids[:before], ids[before:], visible=visible).sum())


def test_masked_sources_are_hidden_from_all_and_cached_ones_from_what_follows_the_context():
  problems = [problem(5), problem(11, (4,))]
  masked, cached = (measure(MODEL, PREFIX, problems, 6, scorer=scorer) for scorer in ("masked", "cached"))
  for one, hidden, quick in zip(problems, masked, cached, strict=True):
    drawn = hidden.masks
    np.testing.assert_array_equal(drawn, quick.masks)
    after = slice(len(PREFIX) + 2 + len(one.sources), None)
    np.testing.assert_allclose(hidden.logp, [hiding(one, mask, slice(None)) for mask in drawn], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(quick.logp, [hiding(one, mask, after) for mask in drawn], rtol=1e-5, atol=1e-5)
    assert np.abs(hidden.logp - quick.logp).max() > 1e-3


@pytest.mark.parametrize("scorer", ["masked", "cached"])
def test_slopes_against_finite_differences_of_a_plain_decoder(scorer):
  """Two tokens share source 0; the answer's own readers differ between the scorers."""
  problems = [shared_source(problem(5)), problem(11, (4,))]
  found = measure(MODEL, PREFIX, problems, 3, scorer=scorer, gradients=2)
  for one, measured in zip(problems, found, strict=True):
    taken = measured.gradients
    assert taken.slopes.shape == (2, len(one.sources))
    np.testing.assert_array_equal(taken.levels, LEVELS[:2])
    np.testing.assert_array_equal(measured.masks[1], ~measured.masks[0])
    for mask, value in zip(measured.masks, measured.logp, strict=True):
      left = [i for i, s in zip(one.prompt, one.source, strict=True) if s < 0 or mask[s]]
      np.testing.assert_allclose(value, score(left, one.answer), rtol=1e-5, atol=1e-5)
    after = slice(None) if scorer == "masked" else slice(len(PREFIX) + 2 + np.count_nonzero(one.source >= 0), None)
    for level, logp, slopes in zip(taken.levels, taken.logp, taken.slopes, strict=True):
      gates = np.full(len(one.sources), level)
      np.testing.assert_allclose(logp, hiding(one, gates, after), rtol=1e-5, atol=1e-5)
      for j in (0, 1, len(one.sources) - 1):
        moved = 1e-5 * (np.arange(len(gates)) == j)
        expected = (hiding(one, gates + moved, after) - hiding(one, gates - moved, after)) / 2e-5
        np.testing.assert_allclose(slopes[j], expected, rtol=1e-3, atol=1e-5)


def shared_source(one: Problem) -> Problem:
  source = np.where(one.source > 0, one.source - 1, one.source)
  return dataclasses.replace(one, source=source.astype(np.int32), sources=one.sources[:-1])


def test_weights_are_mean_slopes_of_the_logit():
  one = problem(5)
  rival = dataclasses.replace(one, rival=np.array([7, 8], np.int32))
  (alone,), (against,) = (measure(MODEL, PREFIX, [p], 0, scorer="masked", gradients=3) for p in (one, rival))

  def rise(slopes, logp):
    return np.mean([s / (1 - np.exp(float(y))) for s, y in zip(slopes.astype(float), logp, strict=True)], axis=0)

  taken, (found,) = alone.gradients, fit([alone])
  np.testing.assert_allclose(found.weights, rise(taken.slopes, taken.logp), rtol=1e-5)
  faint = np.repeat(taken.levels[:, None], 5, axis=1)
  np.testing.assert_allclose(found.predict(faint).mean(), target(taken.logp).mean(), rtol=1e-5)
  assert found.gap == 0
  other, (difference,) = against.gradients, fit([against])
  expected = found.weights - rise(other.slopes[1], other.logp[1])
  np.testing.assert_allclose(difference.weights, expected, rtol=1e-4, atol=1e-6)


def test_masks_give_gradients_the_scale_of_least_squares_and_never_turn_them_round():
  problems = [problem(5), problem(6, (3,))]
  raw, scaled = (fit(measure(MODEL, PREFIX, problems, m, scorer="cached", gradients=2)) for m in (0, 12))
  for before, after in zip(raw, scaled, strict=True):
    masks, y = after.measured.masks, after.measured.targets
    slope, intercept = np.polyfit(masks @ before.weights.astype(float), y, 1)
    slope = max(slope, 0.1)
    np.testing.assert_allclose(after.weights, slope * before.weights, rtol=1e-4)
    np.testing.assert_allclose(after.predict(masks).mean(), y.mean(), rtol=1e-5)
    if slope > 0.1:
      np.testing.assert_allclose(after.intercept, intercept, rtol=1e-4)
    turned = dataclasses.replace(after.measured, logp=logps(-y))
    assert np.all(fit([turned])[0].weights * before.weights >= 0)


@pytest.mark.parametrize("seed", range(6))
def test_few_sources_get_what_their_masks_say(seed):
  """One source: the difference of its two texts. Two: their mean differences, as in a factorial experiment."""
  one, two = problem(1, (seed,)), problem(2, (seed, 1))

  def exact(p, mask):
    left = [i for i, s in zip(p.prompt, p.source, strict=True) if s < 0 or mask[s]]
    return float(target(np.array(score(left, p.answer))))

  (found,) = fit(measure(MODEL, PREFIX, [one], 8, scorer="masked", gradients=1))
  np.testing.assert_allclose(found.weights, [exact(one, [1]) - exact(one, [0])], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(found.predict(np.eye(1)), [exact(one, [1])], rtol=1e-4)
  (found,) = fit(measure(MODEL, PREFIX, [two], 32, scorer="masked", gradients=1))
  assert len(np.unique(found.measured.masks, axis=0)) == 4
  design = np.column_stack([found.measured.masks, np.ones(32)])
  expected = np.linalg.lstsq(design, [exact(two, mask) for mask in found.measured.masks])[0]
  np.testing.assert_allclose([*found.weights, found.intercept], expected, rtol=1e-3, atol=1e-4)


def test_what_has_no_gradient():
  with pytest.raises(ValueError, match="'exact' has no gradient: use masked or cached"):
    measure(MODEL, PREFIX, [problem(3)], 2, gradients=1)
  bare = problem(0)
  (found,) = fit(measure(MODEL, PREFIX, [bare], 2, scorer="masked", gradients=1))
  assert found.weights.shape == (0,)
  np.testing.assert_allclose(found.intercept, target(score(bare.prompt, bare.answer)), rtol=1e-4)
  assert measure(MODEL, PREFIX, [], 2, scorer="cached", gradients=1) == []


def test_all_scorers_agree_where_nothing_is_removed():
  problems = [problem(n, (n,)) for n in (3, 9, 4)]
  everything = [np.ones((2, len(p.sources)), bool) for p in problems]
  for scorer in Scorer:
    for one, values in zip(problems, measure_given(problems, everything, scorer), strict=True):
      np.testing.assert_allclose(values, score(one.prompt, one.answer), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scorer", ["exact", "masked"])
def test_parts_of_an_answer_add_up_to_it(scorer):
  """The chain rule; in the cache the first part would be read with nothing hidden from it."""
  whole = problem(7)
  parts = [part_of(whole, 0, 1), part_of(whole, 1, 3)]
  masks = [np.random.default_rng(5).random((6, 7)) < 0.5] * 3
  total, *each = measure_given([whole, *parts], masks, scorer)
  np.testing.assert_allclose(total, sum(each), rtol=1e-5, atol=1e-5)


def measure_given(problems, masks, scorer):
  return attribute.score(MODEL, PREFIX, problems, masks, scorer=scorer)


def test_a_prompt_without_sources_scores_alike_under_every_mask():
  bare = dataclasses.replace(problem(3), source=np.full(7, -1, np.int32), sources=())
  for scorer in Scorer:
    (values,) = measure_given([bare], [np.zeros((4, 0), bool)], scorer)
    np.testing.assert_allclose(values, score(bare.prompt, bare.answer), rtol=1e-5, atol=1e-5)


def test_a_rival_counts_against_the_answer():
  one = problem(5)
  rival = np.array([7, 8], np.int32)
  for scorer in Scorer:
    both, plain = measure(MODEL, PREFIX, [dataclasses.replace(one, rival=rival), one], 6, scorer=scorer)
    (alone,) = measure(MODEL, PREFIX, [dataclasses.replace(one, answer=rival)], 6, scorer=scorer)
    np.testing.assert_allclose(both.logp, [plain.logp, alone.logp], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(both.targets, target(plain.logp) - target(alone.logp), atol=1e-4)
  (found,) = fit([both])
  (judged,) = judge(MODEL, PREFIX, [found], 6, top=(2,))
  assert np.isfinite([judged.lds, judged.r2, judged.drops[2]]).all()


def test_masks_depend_on_the_problems_seed_alone():
  a, b = problem(9, (7, 0, 0, 1)), problem(9, (7, 0, 0, 2))
  first, second = measure(MODEL, PREFIX, [a, b], 8)
  again, other = measure(MODEL, PREFIX, [b, a], 16)
  assert not np.array_equal(first.masks, second.masks)
  for few, many in ((first, other), (second, again)):
    np.testing.assert_array_equal(many.masks[:8], few.masks)
    np.testing.assert_allclose(many.logp[:8], few.logp, rtol=1e-5)


def test_an_additive_answer_gets_its_effects_back():
  masks = np.array(list(itertools.product([False, True], repeat=4)))
  effects = np.array([3.0, 0.0, -1.0, 0.0])
  values = logps(masks @ effects - 2)
  (one,) = fit([Measurement(problem(4), masks, values)], alpha=0.01)
  # All masks are there, so columns are orthogonal and each effect shrinks by alpha over the variance 1/4.
  np.testing.assert_allclose(one.weights, [2.96, 0, -0.96, 0], atol=1e-5)
  np.testing.assert_allclose(one.predict(masks), masks @ effects - 2, atol=0.05)
  np.testing.assert_allclose(one.measured.targets, target(values))
  assert one.gap <= 1e-6


def test_problems_of_different_sizes_are_fitted_together_and_alone():
  rng = np.random.default_rng(0)
  problems = [problem(s, (s,)) for s in (3, 30, 1)]
  masks = [rng.random((m, len(p.sources))) < 0.5 for m, p in zip((8, 16, 9), problems, strict=True)]
  values = [logps(rng.normal(size=len(v))) for v in masks]
  measured = [Measurement(*parts) for parts in zip(problems, masks, values, strict=True)]
  together = fit(measured)
  for i, one in enumerate(together):
    (alone,) = fit(measured[i : i + 1])
    np.testing.assert_allclose(alone.weights, one.weights, atol=1e-5)
    assert one.weights.shape == (len(problems[i].sources),)


def test_certain_and_impossible_answers_stay_finite():
  masks = np.random.default_rng(0).random((8, 3)) < 0.5
  values = np.where(masks[:, 0], 0.0, -1e6).astype(np.float32)
  (one,) = fit([Measurement(problem(3), masks, values)])
  assert np.all(np.isfinite(one.weights))
  assert np.argmax(one.weights) == 0


def test_without_sources_or_problems():
  bare = problem(0)
  (one,) = fit(measure(MODEL, PREFIX, [bare], 8))
  assert one.weights.shape == (0,)
  np.testing.assert_allclose(one.intercept, target(score(bare.prompt, bare.answer)), rtol=1e-4)
  assert measure(MODEL, PREFIX, [], 8) == fit([]) == []
  assert judge(MODEL, PREFIX, []) == []


def test_judgement_uses_fresh_masks_and_removes_the_strongest_sources():
  one = problem(6)
  (explained,) = fit(measure(MODEL, PREFIX, [one], 32))
  (verdict,) = judge(MODEL, PREFIX, [explained], 16, top=(1, 6))
  strongest = int(np.argmax(explained.weights))
  removed = [i for i, s in zip(one.prompt, one.source, strict=True) if s != strongest]
  full = score(one.prompt, one.answer)
  assert verdict.masks == 16
  np.testing.assert_allclose(verdict.drops[1], full - score(removed, one.answer), atol=1e-4)
  np.testing.assert_allclose(verdict.drops[6], full - score(one.prompt[one.source < 0], one.answer), atol=1e-4)
  assert -1 <= verdict.lds <= 1
  # A surrogate of the wrong sign ranks the very same held-out masks the other way round.
  (opposite,) = judge(MODEL, PREFIX, [dataclasses.replace(explained, weights=-explained.weights)], 16, top=(1,))
  np.testing.assert_allclose(opposite.lds, -verdict.lds, atol=1e-9)


def test_bad_problems():
  one = problem(4)
  with pytest.raises(ValueError, match="problem 1: 8 ids of the prompt but 3 entries"):
    measure(MODEL, PREFIX, [one, dataclasses.replace(one, source=one.source[:3])], 8)
  with pytest.raises(ValueError, match=r"runs from -1 to 3; with 2 sources it must stay in -1 .. 1"):
    measure(MODEL, PREFIX, [dataclasses.replace(one, sources=one.sources[:2])], 8)
  with pytest.raises(ValueError, match="empty answer"):
    measure(MODEL, PREFIX, [dataclasses.replace(one, answer=one.answer[:0])], 8)
  with pytest.raises(ValueError, match="8 of 8 targets are not finite"):
    fit([Measurement(one, np.ones((8, 4), bool), np.full(8, np.nan))])
