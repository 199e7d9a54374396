"""Teacher-forced scores of fixed answers after ablated prompts, and the regression target made of them.

Three scorers, all on the shared-prefix layout:

  exact   the sources are removed from the text; every mask reads a prompt of its own after the header that all share.
  masked  the sources stay in their places, hidden from every token but themselves; as dear as exact.
  cached  the whole context is read once per problem; each mask reads only the question and the answer, for which the
          sources are hidden in the cache. Much cheaper, but the tokens that remain have read those that are hidden.

Rows are put into batches of like width and of few sizes, so that a run compiles few programs.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import decoder, sharding
from attrimem_jax.nn.batching import Ids, batch_size, batches, bucket, pack

_LARGE = 20_000_000  # parameters
_LEAST = -1e-6  # log-probabilities are capped here: the logit of probability 1 is infinite


class Scorer(enum.StrEnum):
  """How the sources that a mask removes are kept from the answer."""

  EXACT = "exact"
  MASKED = "masked"
  CACHED = "cached"


def answer_logprobs(
  model,
  prefix: Ids,
  prompts: Sequence[Ids],
  answers: Sequence[Ids],
  *,
  keep: Sequence[np.ndarray] | None = None,
  dtype: str = "float32",
  token_budget: int = 32768,
  step: int = 16,
) -> np.ndarray:
  """Log-probability of each answer after its prompt, summed over the answer's tokens.

  Args:
    model: `io.models.LanguageModel`.
    prefix: ids that precede every prompt.
    prompts: one per row, not empty.
    answers: one per row, not empty. All of its ids count: an answer that ends with its stop token is scored as a whole
      answer, one without it as the beginning of any.
    keep: for each row [len(prompt)], bool: False hides a token of the prompt from all others; or float in [0, 1], the
      factor of its weight in their attention. None hides none.
    dtype: of the computation; the log-probabilities are float32 in any case.
    token_budget: most padded tokens of one batch.
    step: granularity of padded widths.

  Returns:
    float32 [rows].

  Raises:
    ValueError: a prompt or an answer is empty, or a row exceeds the model's positions.
  """
  scores = np.zeros(len(prompts), np.float32)
  for batch in _batched(model, prefix, prompts, answers, keep, token_budget, step):
    scored = _score_all(
      model.config, batch.answer_width, jnp.dtype(dtype).name, model.params, sharding.spread(batch.shared, model.params)
    )
    scores[batch.rows] = sharding.fetch(scored)[0, : len(batch.rows)]
  return scores


def answer_gradients(
  model,
  prefix: Ids,
  prompts: Sequence[Ids],
  answers: Sequence[Ids],
  keep: Sequence[np.ndarray],
  *,
  dtype: str = "float32",
  token_budget: int = 4096,
  step: int = 16,
) -> tuple[np.ndarray, list[np.ndarray]]:
  """`answer_logprobs` with `keep` float, and the derivative of each by its row's `keep`, float32 [len(prompt)]."""
  scores, slopes = np.zeros(len(prompts), np.float32), [np.zeros(0, np.float32)] * len(prompts)
  for batch in _batched(model, prefix, prompts, answers, keep, token_budget, step):
    scored, sloped = sharding.fetch(
      _differentiate(
        model.config,
        batch.answer_width,
        jnp.dtype(dtype).name,
        "suffix_keep",
        model.params,
        sharding.spread(batch.shared, model.params),
      )
    )
    scores[batch.rows] = scored[0, : len(batch.rows)]
    stop = batch.shared.suffix.shape[-1] - batch.answer_width
    for row, i in enumerate(batch.rows):
      slopes[i] = sloped[0, row, stop - len(prompts[i]) : stop]
  return scores, slopes


class _Batch(NamedTuple):
  """Some of the rows, packed, with the width of their answers."""

  rows: list[int]
  shared: decoder.Shared
  answer_width: int


def _batched(model, prefix, prompts, answers, keep, token_budget, step) -> Iterator[_Batch]:
  """Rows of like width together, all behind one prefix."""
  _check(model, prefix, prompts, answers)
  widths = [
    (bucket(len(answer), 8), bucket(len(prompt), step)) for prompt, answer in zip(prompts, answers, strict=True)
  ]
  for (answer_width, prompt_width), rows, part in batches(widths, token_budget, few=8 if _is_large(model) else 32):
    shared = pack(
      [prefix],
      [[(prompts[i], answers[i]) for i in part]],
      prefix_width=bucket(len(prefix), step),
      prompt_width=prompt_width,
      completion_width=answer_width,
      rows=rows,
    )
    if keep is not None:
      kept = np.ones(shared.suffix_mask.shape, np.asarray(keep[part[0]]).dtype)
      for row, i in enumerate(part):
        kept[0, row, prompt_width - len(keep[i]) : prompt_width] = keep[i]
      shared = dataclasses.replace(shared, suffix_keep=kept)
    yield _Batch(part, shared, answer_width)


def cached_logprobs(
  model,
  prefixes: Sequence[Ids],
  suffixes: Sequence[tuple[Ids, Ids]],
  keeps: Sequence[np.ndarray],
  *,
  dtype: str = "float32",
  token_budget: int = 32768,
  step: int = 16,
) -> list[np.ndarray]:
  """Log-probability of each problem's answer under each of its masks, with one reading of its prefix for all of them.

  Args:
    model: `io.models.LanguageModel`.
    prefixes: header and context of each problem, not empty.
    suffixes: what follows, as (rest of the prompt, answer), neither empty.
    keeps: [M, len(prefix)] of each problem, with the same M: bool, False hides a token of the prefix from the suffix;
      or float in [0, 1], the factor of its weight in the suffix' attention.
    dtype, token_budget, step: as of `answer_logprobs`.

  Returns:
    float32 [M] for each problem.
  """
  scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(prefixes)
  for batch in _cached(model, prefixes, suffixes, keeps, token_budget, step):
    scored = _score_all(
      model.config, batch.answer_width, jnp.dtype(dtype).name, model.params, sharding.spread(batch.shared, model.params)
    )
    for i, row in zip(batch.rows, sharding.fetch(scored), strict=False):
      scores[i] = row
  return scores


def cached_gradients(
  model,
  prefixes: Sequence[Ids],
  suffixes: Sequence[tuple[Ids, Ids]],
  keeps: Sequence[np.ndarray],
  *,
  dtype: str = "float32",
  token_budget: int = 4096,
  step: int = 16,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """`cached_logprobs` with `keeps` float, and derivatives by them, float32 [M, len(prefix)] for each problem."""
  scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(prefixes)
  slopes = list(scores)
  for batch in _cached(model, prefixes, suffixes, keeps, token_budget, step):
    scored, sloped = sharding.fetch(
      _differentiate(
        model.config,
        batch.answer_width,
        jnp.dtype(dtype).name,
        "prefix_keep",
        model.params,
        sharding.spread(batch.shared, model.params),
      )
    )
    for i, row, slope in zip(batch.rows, scored, sloped, strict=False):
      scores[i], slopes[i] = row, slope[:, : len(prefixes[i])]
  return scores, slopes


def _cached(model, prefixes, suffixes, keeps, token_budget, step) -> Iterator[_Batch]:
  """Problems of one shape together, each with all of its masks; the first rows of a batch are those of `rows`."""
  for prefix, suffix in zip(prefixes, suffixes, strict=True):
    _check(model, prefix, [suffix[0]], [suffix[1]])
  # Every mask repeats the suffix, so that its padding costs a large model more than compiling another program.
  fine = 8 if _is_large(model) else 32
  widths = [(bucket(len(x), step), bucket(len(p), fine), bucket(len(a), fine))
            for x, (p, a) in zip(prefixes, suffixes, strict=True)]  # fmt: skip
  for shape in sorted(set(widths)):
    members = [i for i, width in enumerate(widths) if width == shape]
    rows = len(keeps[members[0]])
    while members:
      size = batch_size(len(members), token_budget // (shape[0] + rows * (shape[1] + shape[2])), least=1)
      part, members = members[:size], members[size:]
      filled = part + part[:1] * (size - len(part))
      keep = np.ones((size, rows, shape[0]), keeps[part[0]].dtype)
      for row, i in enumerate(filled):
        keep[row, :, : len(prefixes[i])] = keeps[i]
      shared = pack(
        [prefixes[i] for i in filled],
        [[suffixes[i]] * rows for i in filled],
        prefix_width=shape[0],
        prompt_width=shape[1],
        completion_width=shape[2],
      )
      yield _Batch(part, dataclasses.replace(shared, prefix_keep=keep), shape[2])


def _is_large(model) -> bool:
  """Whether the products of a model outweigh compiling one more program."""
  return sum(leaf.size for leaf in jax.tree.leaves(model.params)) > _LARGE


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score_all(config, count, dtype, params, shared):
  logp, _ = decoder.token_logprobs(config, params, shared, count, dtype=jnp.dtype(dtype))
  return logp.sum(-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _differentiate(config, count, dtype, field, params, shared):
  """Scores, and the derivative of each by its own row of the field of `shared` that holds what it may see."""

  def total(keep):
    seen = dataclasses.replace(shared, **{field: keep})
    # Keeping a layer's activations is slower than computing them again, on a CPU as well: memory is what it waits for.
    logp, _ = decoder.token_logprobs(config, params, seen, count, dtype=jnp.dtype(dtype), remat=True)
    return logp.sum(), logp.sum(-1)

  slopes, scores = jax.grad(total, has_aux=True)(getattr(shared, field))
  return scores, slopes


def _check(model, prefix, prompts, answers) -> None:
  for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    if len(prompt) == 0 or len(answer) == 0:
      raise ValueError(f"row {i} has an empty {'prompt' if len(prompt) == 0 else 'answer'}: nothing can be scored")
    total, limit = len(prefix) + len(prompt) + len(answer), model.config.max_positions
    if total > limit:
      raise ValueError(f"row {i} has {total} tokens, {model.name} reads {limit}: shorten the context or the answer")


def target(logp: np.ndarray) -> np.ndarray:
  """The regression target g = log f - log(1 - f) of f = exp(logp), float64, finite for every finite logp.

  Computed as l - log(-expm1(l)) near 0 and l - log1p(-exp(l)) elsewhere, with l capped at -1e-6, so that g <= 13.8
  (AttriMem eq. 10).
  """
  capped = np.minimum(np.asarray(logp, np.float64), _LEAST)
  near = capped > -np.log(2)
  # Both branches are safe on both sides, but each is accurate on its own only.
  complement = np.where(near, np.log(-np.expm1(np.where(near, capped, -1.0))), np.log1p(-np.exp(capped)))
  return capped - complement


def target_slope(logp: np.ndarray) -> np.ndarray:
  """The derivative of `target`, 1 / (1 - exp(logp)), float64; from -1e-6 on that of -1e-6."""
  return -1 / np.expm1(np.minimum(np.asarray(logp, np.float64), _LEAST))
