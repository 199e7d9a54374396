"""Attribution of an answer to the tokens in its context: mask, score, fit (AttriMem §3.3, after ContextCite).

For each problem, M random masks remove sources from the prompt, the answer model scores the fixed answer after what is
left, and a LASSO of the scores' logits on the masks gives every source a weight. All problems are scored and fitted
together.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.attribution import lasso
from attrimem_jax.attribution.ablations import ablate, draw, stays
from attrimem_jax.attribution.faithfulness import Faithfulness, lds, r2, without_top
from attrimem_jax.attribution.scoring import Scorer, answer_logprobs, cached_logprobs, target
from attrimem_jax.memory.context import Source


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
class Attribution:
  """Weights of a problem's sources with the measurements behind them.

  Attributes:
    problem: what was explained.
    weights: float32 [S], logits that a source adds to the answer.
    intercept: the surrogate's value with every source removed.
    gap: relative duality gap of the fit.
    masks: bool [M, S].
    logp: float32 [M], log-probability of the answer under each mask; [2, M], also of the rival, where there is one.
    targets: float64 [M], its logit, less that of the rival.
  """

  problem: Problem
  weights: np.ndarray
  intercept: float
  gap: float
  masks: np.ndarray
  logp: np.ndarray
  targets: np.ndarray

  def predict(self, masks: np.ndarray) -> np.ndarray:
    """The surrogate's targets, float64 [M], for masks bool [M, S]."""
    return self.intercept + masks.astype(np.float64) @ self.weights.astype(np.float64)


def measure(
  model,
  prefix: Sequence[int],
  problems: Sequence[Problem],
  masks: int,
  *,
  keep: float = 0.5,
  antithetic: bool = False,
  scorer: str = "exact",
  dtype: str = "float32",
  step: int = 16,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Draws the masks of every problem and scores its answer under each.

  Args:
    model: the frozen answer model, an `io.models.LanguageModel`.
    prefix: ids that precede every prompt and are read once for all.
    problems: what to explain; a problem's masks follow from its own seed, whatever stands beside it.
    masks: M. The first masks of a problem are the same for every M.
    keep: probability that a source stays.
    antithetic: draw masks in pairs (v, 1 - v).
    scorer: how the sources that a mask removes are kept from the answer (`scoring.Scorer`).
    dtype, step: of the computation, and granularity of padded widths.

  Returns:
    For each problem its masks, bool [M, S], and its answer's log-probability under each, float32 [M], or [2, M] with
    that of its rival.

  Raises:
    ValueError: `source` does not fit prompt and sources, or a row is empty or too long for the model.
  """
  _check(problems)
  drawn = [draw(_rng(p), masks, len(p.sources), keep, antithetic) for p in problems]
  return drawn, score(model, prefix, problems, drawn, scorer=scorer, dtype=dtype, step=step)


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
  rivals = [(i, p.rival) for i, p in enumerate(problems) if p.rival is not None]
  everything = [*problems, *(dataclasses.replace(problems[i], answer=rival, rival=None) for i, rival in rivals)]
  drawn = [*masks, *(masks[i] for i, _ in rivals)]
  scores = _SCORERS[Scorer(scorer)](model, prefix, everything, drawn, dtype, step)
  paired = {i: np.stack([scores[i], scores[len(problems) + k]]) for k, (i, _) in enumerate(rivals)}
  return [paired.get(i, scores[i]) for i in range(len(problems))]


def _scores_from_text(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  prompts = [row for p, v in zip(problems, masks, strict=True) for row in ablate(p.prompt, p.source, v)]
  answers = [p.answer for p, v in zip(problems, masks, strict=True) for _ in v]
  return _split(answer_logprobs(model, prefix, prompts, answers, dtype=dtype, step=step), masks)


def _scores_in_place(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  pairs = [(p, row) for p, v in zip(problems, masks, strict=True) for row in ~stays(p.source, v)]
  prompts, answers, hidden = [p.prompt for p, _ in pairs], [p.answer for p, _ in pairs], [row for _, row in pairs]
  return _split(answer_logprobs(model, prefix, prompts, answers, hidden=hidden, dtype=dtype, step=step), masks)


def _split(scores: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
  stops = np.cumsum([len(v) for v in masks], dtype=int)
  return [scores[stop - len(v) : stop] for v, stop in zip(masks, stops, strict=True)]


def _scores_from_cache(model, prefix, problems, masks, dtype, step) -> list[np.ndarray]:
  """The context up to its last source is the shared prefix; all tokens after it are read again for every mask."""
  ends = [_context_end(p) for p in problems]
  header = np.asarray(prefix, np.int32)
  keeps = [
    np.concatenate([np.ones((len(v), len(header)), bool), stays(p.source[:end], v)], axis=1)
    for p, v, end in zip(problems, masks, ends, strict=True)
  ]
  return cached_logprobs(
    model,
    [np.concatenate([header, p.prompt[:end]]) for p, end in zip(problems, ends, strict=True)],
    [(p.prompt[end:], p.answer) for p, end in zip(problems, ends, strict=True)],
    keeps,
    dtype=dtype,
    step=step,
  )


def _context_end(problem: Problem) -> int:
  """The place behind the last source of a prompt; 0 if it has none."""
  places = np.flatnonzero(problem.source >= 0)
  return int(places[-1]) + 1 if len(places) else 0


_SCORERS = {Scorer.EXACT: _scores_from_text, Scorer.MASKED: _scores_in_place, Scorer.CACHED: _scores_from_cache}


def tokens_read(prefix: Sequence[int], problem: Problem, masks: np.ndarray, scorer: str = "exact") -> int:
  """How many tokens the model reads to score one problem, padding aside: what a measurement costs."""
  end = _context_end(problem)
  tail = len(problem.prompt) - end + len(problem.answer)
  if Scorer(scorer) is Scorer.CACHED:
    return len(prefix) + end + len(masks) * tail
  context = int(stays(problem.source[:end], masks).sum()) if Scorer(scorer) is Scorer.EXACT else len(masks) * end
  return len(prefix) + context + len(masks) * tail


def _check(problems: Sequence[Problem]) -> None:
  for i, p in enumerate(problems):
    if len(p.prompt) != len(p.source):
      raise ValueError(f"problem {i}: {len(p.prompt)} ids of the prompt but {len(p.source)} entries in `source`")
    if len(p.source) and not -1 <= p.source.min() <= p.source.max() < len(p.sources):
      raise ValueError(
        f"problem {i}: `source` runs from {p.source.min()} to {p.source.max()}; with {len(p.sources)} sources it must "
        f"stay in -1 .. {len(p.sources) - 1}"
      )


def fit(
  problems: Sequence[Problem],
  masks: Sequence[np.ndarray],
  scores: Sequence[np.ndarray],
  *,
  alpha: float = 0.01,
  penalty: str = "raw",
) -> list[Attribution]:
  """Fits every problem's surrogate in one batch of the LASSO kernel."""
  targets = [_target(logp) for logp in scores]
  regressions = [lasso.Problem(v, y, len(p.answer)) for p, v, y in zip(problems, masks, targets, strict=True)]
  fits = lasso.fit(regressions, penalty=lasso.Penalty(penalty), alpha=alpha)
  return [
    Attribution(p, f.weights, f.intercept, f.gap, v, logp, y)
    for p, f, v, logp, y in zip(problems, fits, masks, scores, targets, strict=True)
  ]


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


def _judged(attribution: Attribution, held_out: np.ndarray, logp: np.ndarray, top: Sequence[int]) -> Faithfulness:
  count = len(held_out)
  predicted, actual = attribution.predict(held_out), _target(logp[..., :count])
  value = logp if logp.ndim == 1 else logp[0] - logp[1]
  drops = {k: float(value[count] - without) for k, without in zip(top, value[count + 1 :], strict=True)}
  return Faithfulness(lds(predicted, actual), r2(predicted, actual), drops, count)
