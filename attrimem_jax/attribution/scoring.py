"""Teacher-forced scores of fixed answers after many prompts, and the regression target made of them.

Scoring is exact: every prompt is read as it stands, on the shared-prefix layout with the header of the answer prompt as
the one prefix. Rows are put into batches of like width and of few sizes, so that a run compiles few programs.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import Ids, batches, bucket, pack

_LEAST = -1e-6  # log-probabilities are capped here: the logit of probability 1 is infinite


def answer_logprobs(
  model,
  prefix: Ids,
  prompts: Sequence[Ids],
  answers: Sequence[Ids],
  *,
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
    dtype: of the computation; the log-probabilities are float32 in any case.
    token_budget: most padded tokens of one batch.
    step: granularity of padded widths.

  Returns:
    float32 [rows].

  Raises:
    ValueError: a prompt or an answer is empty, or a row exceeds the model's positions.
  """
  _check(model, prefix, prompts, answers)
  scores = np.zeros(len(prompts), np.float32)
  widths = [
    (bucket(len(answer), 8), bucket(len(prompt), step)) for prompt, answer in zip(prompts, answers, strict=True)
  ]
  for (answer_width, prompt_width), rows, part in batches(widths, token_budget):
    shared = pack(
      [prefix],
      [[(prompts[i], answers[i]) for i in part]],
      prefix_width=bucket(len(prefix), step),
      prompt_width=prompt_width,
      completion_width=answer_width,
      rows=rows,
    )
    scored = _score(model.config, answer_width, jnp.dtype(dtype).name, model.params, shared)
    scores[part] = np.asarray(scored)[: len(part)]
  return scores


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(config, count, dtype, params, shared):
  logp, _ = decoder.token_logprobs(config, params, shared, count, dtype=jnp.dtype(dtype))
  return logp[0].sum(-1)


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
