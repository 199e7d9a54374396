"""Supervised warm start: one compiled update on the shared-prefix layout of the GRPO update.

Only completion tokens carry a loss, the stop token among them (a policy that never trains on its stop token never
learns to stop). The mean runs over all tokens of the whole batch, so neither micro-batches nor devices change it.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct

from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.lora import Lora, whole
from attrimem_jax.rl import accumulation
from attrimem_jax.rl import optimizer as optimizers
from attrimem_jax.rl.accumulation import Params, Totals
from attrimem_jax.rl.optimizer import StepFunction, TrainState

Metrics = dict[str, jax.Array]


@struct.dataclass
class SftBatch:
  """`shared` is `[P, ...]`; `loss_mask` bool[P, n, C] says which of the last C suffix columns are targets.

  Every array may carry one more axis in front, the micro-batches (`accumulation.split`).
  """

  shared: decoder.Shared
  loss_mask: jax.Array


def make_sft_update(
  config: DecoderConfig,
  optimizer: optax.GradientTransformation,
  logprobs: Callable | None = None,
  lora: Lora | None = None,
) -> StepFunction:
  """The compiled `update(state, batch) -> (state, metrics)`; the state's buffers are donated.

  With `lora` it is `update(state, batch, frozen)`: the state holds the factors alone, `frozen` the weights beside them.

  Args:
    config: shape of the network.
    optimizer: made by `optimizer.make_optimizer`.
    logprobs: `(params, shared, count) -> (logp, entropy)`, float32[P, n, count]. By default the decoder's own in
      float32; pass `functools.partial(decoder.token_logprobs, config, dtype=..., remat=True)` for a large model.
    lora: what the state's parameters are factors of, or None where they are whole.

  Returns:
    The update. Its metrics: `loss` (mean negative log-likelihood of a token, nats), `entropy`, `tokens`, `grad_norm`,
    `update_norm`, `skipped`.
  """
  of_whole = functools.partial(_loss, logprobs or functools.partial(decoder.token_logprobs, config))

  def update(state: TrainState, batch: SftBatch, frozen: Params | None = None) -> tuple[TrainState, Metrics]:
    assert (frozen is not None) == (lora is not None), "frozen weights go with LoRA"

    def loss_fn(params: Params, micro: tuple[SftBatch, jax.Array]) -> tuple[jax.Array, Totals]:
      return of_whole(whole(lora, frozen, params), micro)

    micro_batches, tokens = _weighted(batch)
    loss, gradients, totals = accumulation.accumulate(loss_fn, state.params, micro_batches)
    state, metrics = optimizers.apply_gradients(optimizer, state, gradients, tokens)
    return state, {"loss": loss, "tokens": tokens, **totals.sums, **metrics}

  return StepFunction(update)


def make_sft_evaluation(
  config: DecoderConfig, logprobs: Callable | None = None
) -> Callable[[Params, SftBatch], tuple[jax.Array, jax.Array]]:
  """The compiled `evaluate(params, batch) -> (loss, tokens)`; weight losses by tokens to average several batches."""
  loss_fn = functools.partial(_loss, logprobs or functools.partial(decoder.token_logprobs, config))

  def evaluate(params: Params, batch: SftBatch) -> tuple[jax.Array, jax.Array]:
    micro_batches, tokens = _weighted(batch)
    return jnp.sum(jax.lax.map(lambda micro: loss_fn(params, micro)[0], micro_batches)), tokens

  return jax.jit(evaluate)


def _weighted(batch: SftBatch) -> tuple[tuple[SftBatch, jax.Array], jax.Array]:
  """((batch with a micro-batch axis, weight of each token), tokens). Weights sum to 1 over the whole batch."""
  if batch.loss_mask.ndim == 3:
    batch = jax.tree.map(lambda leaf: leaf[None], batch)
  mask = batch.loss_mask.astype(bool) & batch.shared.suffix_mask[..., -batch.loss_mask.shape[-1] :]
  tokens = jnp.sum(mask, dtype=jnp.float32)
  return (batch, mask / jnp.maximum(tokens, 1.0)), tokens


def _loss(logprobs: Callable, params: Params, micro: tuple[SftBatch, jax.Array]) -> tuple[jax.Array, Totals]:
  batch, weight = micro
  logp, entropy = logprobs(params, batch.shared, weight.shape[-1])
  loss = -jnp.sum(weight * jnp.where(weight > 0, logp, 0.0))
  entropy = jax.lax.stop_gradient(jnp.sum(weight * jnp.where(weight > 0, entropy, 0.0)))
  return loss, Totals(sums={"entropy": entropy}, maxima={})
