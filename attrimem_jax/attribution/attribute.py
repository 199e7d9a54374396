"""Attribution of an answer to the tokens in its context: measure, then estimate what every source is worth.

A weight is the number of logits that a source adds to the answer's probability. Two ways to it:

  LASSO      M random masks remove sources from the prompt, the answer model scores the fixed answer after what is left,
             and a LASSO of the scores' logits on the masks gives every source a weight (AttriMem §3.3, after
             ContextCite). It sees S sources through M numbers.
  gradients  all sources are made faint: their weight in the attention of others is multiplied by one factor, and the
             derivative of the logit by each source's own factor is taken, at some factors. Each of them tells something
             of every source, at about three times the price of a mask. Faint sources crowd each other out less than
             whole ones, so the mean derivative overstates them; a few random masks put it to scale.

All problems are measured and estimated together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from attrimem_jax.attribution import lasso
from attrimem_jax.attribution.ablations import LEVELS, ablate, draw, draw_pairs, stays
from attrimem_jax.attribution.faithfulness import Faithfulness, lds, r2, without_top
from attrimem_jax.attribution.scoring import (
  Scorer,
  answer_gradients,
  answer_logprobs,
  cached_gradients,
  cached_logprobs,
  target,
  target_slope,
)
from attrimem_jax.memory.context import Source

_LEAST_SCALE = 0.1  # of gradients: a few masks may deny that they mean anything, but not tell which way they point


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """One answer to explain.

  Attributes:
    prompt: int32 [T], what follows the shared prefix.
    source: int32 [T], index into `sources` or -1.
    sources: S of them.
    answer: ids whose probability is explained.
    seed: of the masks, a path of numbers (seed, step, history, rollout, question).
    rival: ids of another answer, or None. With one, what is explained is by how much `answer` is likelier than it.
  """

  prompt: np.ndarray
  source: np.ndarray
  sources: tuple[Source, ...]
  answer: np.ndarray
  seed: tuple[int, ...]
  rival: np.ndarray | None = None


def part_of(problem: Problem, start: int, stop: int) -> Problem:
  """The same problem for the tokens [start, stop) of its answer alone, given those before them."""
  before = problem.answer[:start]
  return dataclasses.replace(
    problem,
    prompt=np.concatenate([problem.prompt, before]).astype(np.int32),
    source=np.concatenate([problem.source, np.full(len(before), -1, np.int32)]),
    answer=problem.answer[start:stop],
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
  """What the answer model said of one problem.

  Attributes:
    problem: what is explained.
    masks: bool [M, S], which sources stayed.
    logp: float32 [M], log-probability of the answer under each mask; [2, M], also of the rival, where there is one.
    gradients: None, or those to which the masks only give the scale.
  """

  problem: Problem
  masks: np.ndarray
  logp: np.ndarray
  gradients: "Gradients | None" = None

  def __str__(self) -> str:
    masks = _plural(len(self.masks), "mask")
    if self.gradients is None:
      return masks
    return _plural(len(self.gradients.levels), "gradient") + (f" and {masks}" if len(self.masks) else "")

  @property
  def targets(self) -> np.ndarray:
    """Logits of the answer's probability, less those of the rival's, float64 [M]."""
    return _target(self.logp)


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
  """Derivatives of an answer's log-probability by every source's factor, where all have the same.

  Attributes:
    levels: float64 [G], the factors.
    logp: float32 [G] or [2, G], as of `Measurement`.
    slopes: float32 [G, S] or [2, G, S], the derivatives of `logp`.
  """

  levels: np.ndarray
  logp: np.ndarray
  slopes: np.ndarray


def _plural(count: int, noun: str) -> str:
  return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclasses.dataclass(frozen=True, eq=False)
class Attribution:
  """Weights of a problem's sources with the measurements behind them.

  Attributes:
    problem: what was explained.
    weights: float32 [S], logits that a source adds to the answer.
    intercept: the surrogate's value with every source removed.
    gap: relative duality gap of the LASSO; 0 where there is none.
    measured: by which.
    faithfulness: how it was judged, if it was.
  """

  problem: Problem
  weights: np.ndarray
  intercept: float
  gap: float
  measured: Measurement
  faithfulness: Faithfulness | None = None

  def predict(self, masks: np.ndarray) -> np.ndarray:
    """The surrogate's targets, float64 [M], for masks bool [M, S]."""
    return self.intercept + masks.astype(np.float64) @ self.weights.astype(np.float64)


def measure(
  model,
  prefix: Sequence[int],
  problems: Sequence[Problem],
  masks: int,
  *,
  gradients: int = 0,
  keep: float = 0.5,
  scorer: str = "exact",
  dtype: str = "float32",
  step: int = 16,
) -> list[Measurement]:
  """Measures what `fit` makes weights of.

  Args:
    model: the frozen answer model, an `io.models.LanguageModel`.
    prefix: ids that precede every prompt and are read once for all.
    problems: what to explain; a problem's masks follow from its own seed, whatever stands beside it.
    masks: M random ones; with gradients in pairs of a mask and its opposite, so that every source is there in one half
      of them and not in the other. The first of a problem are the same for every M.
    gradients: how many of `ablations.LEVELS` derivatives are taken at; 0: a LASSO is to be fitted to the masks.
    keep: probability that a source stays under a random mask.
    scorer: how the sources that a mask removes are kept from the answer (`scoring.Scorer`). With gradients, where they
      are faint ("exact" knows no such thing); the masks that give these their scale are exact.
    dtype, step: of the computation, and granularity of padded widths.

  Raises:
    ValueError: `source` does not fit prompt and sources, a row is empty or too long for the model, or the scorer has no
      gradient.
  """
  _check(problems)
  settings: dict[str, Any] = {"dtype": dtype, "step": step}
  sloped: list[Gradients | None] = [None] * len(problems)
  if gradients:
    assert gradients <= len(LEVELS), f"{gradients} gradients, there are {len(LEVELS)} levels"
    levels = np.array(LEVELS[:gradients])
    faint = [np.repeat(levels[:, None], len(p.sources), axis=1) for p in problems]
    found = slopes(model, prefix, problems, faint, scorer=scorer, **settings)
    sloped, scorer = [Gradients(levels, *pair) for pair in zip(*found, strict=True)], "exact"
  drawn = [(draw_pairs if gradients else draw)(_rng(p), masks, len(p.sources), keep) for p in problems]
  scores = score(model, prefix, problems, drawn, scorer=scorer, **settings)
  return [Measurement(*parts) for parts in zip(problems, drawn, scores, sloped, strict=True)]


def _rng(problem: Problem, purpose: int = 0) -> np.random.Generator:
  """Masks to fit and masks to judge by come from different `purpose`s, so one never repeats the other."""
  return np.random.default_rng(np.random.SeedSequence(problem.seed, spawn_key=(purpose,)))


def score(
  model,
  prefix: Sequence[int],
  problems: Sequence[Problem],
  masks: Sequence[np.ndarray],
  *,
  scorer: str = "exact",
  dtype: str = "float32",
  step: int = 16,
) -> list[np.ndarray]:
  """Log-probability of every problem's answer under each of its masks, all scored together: float32 [M] or [2, M]."""
  everything, drawn, put_together = _with_rivals(problems, masks)
  return put_together(_SCORERS[Scorer(scorer)](model, prefix, everything, drawn, dtype, step))


def slopes(
  model,
  prefix: Sequence[int],
  problems: Sequence[Problem],
  gates: Sequence[np.ndarray],
  *,
  scorer: str = "masked",
  dtype: str = "float32",
  step: int = 16,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """`score` with half-closed gates, and its derivative by each of them.

  Args:
    gates: float [M, S] in (0, 1] for each problem: the factor of a source's weight in the attention of those from which
      `scorer` ("masked" or "cached") would hide it.

  Returns:
    For each problem log-probabilities, float32 [M], and derivatives, float32 [M, S]; [2, M] and [2, M, S] with a rival.
  """
  if Scorer(scorer) not in _SLOPES:
    raise ValueError(f"the scorer {scorer!r} has no gradient: use {' or '.join(_SLOPES)} with it")
  everything, drawn, put_together = _with_rivals(problems, gates)
  drawn = [np.asarray(g, np.float32) for g in drawn]
  scores, by_token = _SLOPES[Scorer(scorer)](model, prefix, everything, drawn, dtype, step)
  by_source = [_per_source(p, one) for p, one in zip(everything, by_token, strict=True)]
  return put_together(scores), put_together(by_source)


def _with_rivals(problems: Sequence[Problem], masks: Sequence[np.ndarray]):
  """(problems and rivals, their masks, a function that stacks what was found of a rival on what was of its problem)."""
  rivals = [(i, p.rival) for i, p in enumerate(problems) if p.rival is not None]
  everything = [*problems, *(dataclasses.replace(problems[i], answer=rival, rival=None) for i, rival in rivals)]

  def put_together(found: Sequence[np.ndarray]) -> list[np.ndarray]:
    paired = {i: np.stack([found[i], found[len(problems) + k]]) for k, (i, _) in enumerate(rivals)}
    return [paired.get(i, found[i]) for i in range(len(problems))]

  return everything, [*masks, *(masks[i] for i, _ in rivals)], put_together


def _per_source(problem: Problem, by_token: np.ndarray) -> np.ndarray:
  """Sums derivatives float32 [M, ≤ T] over the tokens of each source."""
  found = np.zeros((len(problem.sources) + 1, len(by_token)), np.float32)
  np.add.at(found, problem.source[: by_token.shape[1]], by_token.T)  # -1 is the added row
  return found[:-1].T


def _scores_from_text(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  prompts = [row for p, v in zip(problems, masks, strict=True) for row in ablate(p.prompt, p.source, v)]
  answers = [p.answer for p, v in zip(problems, masks, strict=True) for _ in v]
  return _split(answer_logprobs(model, prefix, prompts, answers, dtype=dtype, step=step), masks)


def _scores_in_place(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  prompts, answers, keep = _in_place(problems, masks)
  return _split(answer_logprobs(model, prefix, prompts, answers, keep=keep, dtype=dtype, step=step), masks)


def _slopes_in_place(model, prefix, problems, gates, dtype, step) -> tuple[list[np.ndarray], list[np.ndarray]]:
  scores, found = answer_gradients(model, prefix, *_in_place(problems, gates), dtype=dtype, step=step)
  rows = iter(found)
  by_token = [
    np.stack([next(rows) for _ in g]) if len(g) else np.zeros((0, len(p.prompt)), np.float32)
    for p, g in zip(problems, gates, strict=True)
  ]
  return _split(scores, gates), by_token


def _in_place(problems, masks) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
  """Prompts, answers and what stays of the prompts, a row for each mask."""
  pairs = [(p, row) for p, v in zip(problems, masks, strict=True) for row in stays(p.source, v)]
  return [p.prompt for p, _ in pairs], [p.answer for p, _ in pairs], [row for _, row in pairs]


def _split(scores: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
  stops = np.cumsum([len(v) for v in masks], dtype=int)
  return [scores[stop - len(v) : stop] for v, stop in zip(masks, stops, strict=True)]


def _scores_from_cache(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  return cached_logprobs(model, *_behind_contexts(prefix, problems, masks), dtype=dtype, step=step)


def _slopes_from_cache(model, prefix, problems, gates, dtype, step) -> tuple[list[np.ndarray], list[np.ndarray]]:
  scores, found = cached_gradients(model, *_behind_contexts(prefix, problems, gates), dtype=dtype, step=step)
  return scores, [one[:, len(prefix) :] for one in found]


def _behind_contexts(prefix, problems, masks):
  """The context up to its last source is the shared prefix; all tokens after it are read again for every mask."""
  ends = [_context_end(p) for p in problems]
  header = np.asarray(prefix, np.int32)
  keeps = [
    np.concatenate([np.ones((len(v), len(header)), v.dtype), stays(p.source[:end], v)], axis=1)
    for p, v, end in zip(problems, masks, ends, strict=True)
  ]
  contexts = [np.concatenate([header, p.prompt[:end]]) for p, end in zip(problems, ends, strict=True)]
  return contexts, [(p.prompt[end:], p.answer) for p, end in zip(problems, ends, strict=True)], keeps


def _context_end(problem: Problem) -> int:
  """The place behind the last source of a prompt; 0 if it has none."""
  places = np.flatnonzero(problem.source >= 0)
  return int(places[-1]) + 1 if len(places) else 0


_SCORERS = {Scorer.EXACT: _scores_from_text, Scorer.MASKED: _scores_in_place, Scorer.CACHED: _scores_from_cache}
_SLOPES = {Scorer.MASKED: _slopes_in_place, Scorer.CACHED: _slopes_from_cache}


def tokens_read(prefix: Sequence[int], problem: Problem, masks: np.ndarray, scorer: str = "exact") -> int:
  """How many tokens the model reads to score one problem under masks, padding aside."""
  end = _context_end(problem)
  tail = len(problem.prompt) - end + len(problem.answer)
  if Scorer(scorer) is Scorer.CACHED:
    return len(prefix) + end + len(masks) * tail
  context = int(stays(problem.source[:end], masks).sum()) if Scorer(scorer) is Scorer.EXACT else len(masks) * end
  return len(prefix) + context + len(masks) * tail


def price(prefix: Sequence[int], measured: Measurement, scorer: str) -> int:
  """How many tokens a measurement read; a gradient counts three times: forward, again, and backward."""
  problem = measured.problem
  if measured.gradients is None:
    return tokens_read(prefix, problem, measured.masks, scorer)
  faint = np.ones((3 * len(measured.gradients.levels), len(problem.sources)), bool)
  masked = tokens_read(prefix, problem, measured.masks) if len(measured.masks) else 0
  return tokens_read(prefix, problem, faint, scorer) + masked


def _check(problems: Sequence[Problem]) -> None:
  for i, p in enumerate(problems):
    if len(p.prompt) != len(p.source):
      raise ValueError(f"problem {i}: {len(p.prompt)} ids of the prompt but {len(p.source)} entries in `source`")
    if len(p.source) and not -1 <= p.source.min() <= p.source.max() < len(p.sources):
      raise ValueError(
        f"problem {i}: `source` runs from {p.source.min()} to {p.source.max()}; with {len(p.sources)} sources it must "
        f"stay in -1 .. {len(p.sources) - 1}"
      )


def fit(measured: Sequence[Measurement], *, alpha: float = 0.01, penalty: str = "raw") -> list[Attribution]:
  """The weights that go with every measurement; all LASSOs are solved in one batch of the kernel."""
  masked = [m for m in measured if m.gradients is None]
  regressions = [lasso.Problem(m.masks, m.targets, len(m.problem.answer)) for m in masked]
  fits = iter(lasso.fit(regressions, penalty=lasso.Penalty(penalty), alpha=alpha))
  return [_by_lasso(m, next(fits)) if m.gradients is None else _by_gradients(m, m.gradients) for m in measured]


def _by_lasso(measured: Measurement, fit: lasso.Fit) -> Attribution:
  return Attribution(measured.problem, fit.weights, fit.intercept, fit.gap, measured)


def _by_gradients(measured: Measurement, gradients: Gradients) -> Attribution:
  """The mean derivative of the target, on the line through the masks' targets where there are masks.

  Where the masks are half of all subsets or more, they know better: what the line leaves goes to the sources by least
  squares, the smallest change that explains it.
  """
  by_level = gradients.slopes * target_slope(gradients.logp)[..., None]
  by_level = by_level if gradients.logp.ndim == 1 else by_level[0] - by_level[1]
  weights = by_level.mean(axis=0)
  if len(measured.masks):
    x, y = measured.masks @ weights, measured.targets
  else:
    x, y = gradients.levels * weights.sum(), _target(gradients.logp)
  scale = 1.0
  if len(measured.masks) and np.ptp(x) > 0:
    scale = max(float(np.mean((x - x.mean()) * (y - y.mean())) / np.var(x)), _LEAST_SCALE)
  weights, x = scale * weights, scale * x
  if len(weights) and 2 ** (len(weights) - 1) <= len(measured.masks):
    centred = measured.masks - measured.masks.mean(axis=0)
    weights = weights + np.linalg.lstsq(centred, y - y.mean() - centred @ weights)[0]
    x = measured.masks @ weights
  return Attribution(measured.problem, weights.astype(np.float32), float(y.mean() - x.mean()), 0.0, measured)


def _target(logp: np.ndarray) -> np.ndarray:
  return target(logp) if logp.ndim == 1 else target(logp[0]) - target(logp[1])


def judge(
  model,
  prefix: Sequence[int],
  attributions: Sequence[Attribution],
  masks: int = 16,
  *,
  top: Sequence[int] = (1, 4, 16),
  keep: float = 0.5,
  dtype: str = "float32",
  step: int = 16,
) -> list[Faithfulness]:
  """Judges each attribution by `masks` fresh masks, and by what goes with its k strongest sources, for k in `top`."""
  problems = [a.problem for a in attributions]
  held_out = [draw(_rng(p, 1), masks, len(p.sources), keep) for p in problems]
  rows = [
    np.concatenate([v, np.ones((1, v.shape[1]), bool), without_top(a.weights, top)])
    for a, v in zip(attributions, held_out, strict=True)
  ]
  scores = score(model, prefix, problems, rows, dtype=dtype, step=step)
  return [_judged(a, v, logp, top) for a, v, logp in zip(attributions, held_out, scores, strict=True)]


def gated(attribution: Attribution, faithfulness: Faithfulness) -> Attribution:
  """The attribution with weights that count as much as they can be believed: times its LDS, and 0 where that is < 0."""
  trust = np.float32(max(faithfulness.lds, 0.0))
  return dataclasses.replace(attribution, weights=attribution.weights * trust, faithfulness=faithfulness)


def _judged(attribution: Attribution, held_out: np.ndarray, logp: np.ndarray, top: Sequence[int]) -> Faithfulness:
  count = len(held_out)
  predicted, actual = attribution.predict(held_out), _target(logp[..., :count])
  value = logp if logp.ndim == 1 else logp[0] - logp[1]
  drops = {k: float(value[count] - without) for k, without in zip(top, value[count + 1 :], strict=True)}
  return Faithfulness(lds(predicted, actual), r2(predicted, actual), drops, count)
