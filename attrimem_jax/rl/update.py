"""The GRPO update: one compiled function from (state, starting policy, batch) to (state, metrics).

Per micro-batch it computes the log-probabilities of the starting policy and of the policy, and the loss with its
gradient; the gradients are summed, clipped and handed to the optimiser. Every weight that a token has in the loss is
computed over the whole batch before the first micro-batch, so a split changes nothing (`accumulation`). Advantages
come from the host (`advantages`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from attrimem_jax.nn import decoder
from attrimem_jax.nn import lora as low_rank
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.lora import Lora
from attrimem_jax.rl import accumulation
from attrimem_jax.rl import optimizer as optimizers
from attrimem_jax.rl.accumulation import Params, Totals
from attrimem_jax.rl.loss import LossSettings, Tokens, policy_loss, token_weights
from attrimem_jax.rl.optimizer import StepFunction, TrainState

Metrics = dict[str, jax.Array]

FIRST_KL = 1e-4


@struct.dataclass
class Batch:
  """One optimisation batch. Every array may carry one more axis in front, the micro-batches (`accumulation.split`).

  Attributes:
    shared: the prefixes and suffixes, [P, ...]; completions are the last C suffix columns.
    loss_mask: bool[P, n, C], the sampled tokens that are trained on; the stop token is one, padding never is.
    advantages: float32[P, n, C].
    old_logp: float32[P, n, C] from `make_logprobs` before the first of several updates on the same samples; None for
      one update.
    sampler_logp: float32[P, n, C] as sampled, or None.
  """

  shared: decoder.Shared
  loss_mask: decoder.Array
  advantages: decoder.Array
  old_logp: decoder.Array | None = None
  sampler_logp: decoder.Array | None = None


def make_update(
  config: DecoderConfig,
  optimizer: optax.GradientTransformation,
  settings: LossSettings,
  logprobs: Callable | None = None,
  lora: Lora | None = None,
) -> StepFunction:
  """The compiled `update(state, reference_params, batch)`; the state's buffers are donated.

  `reference_params` are the starting weights in buffers of their own (`jax.tree.map(jnp.copy, params)`), or None
  exactly where `settings.kl_coefficient` is 0. With `lora` the state holds its factors alone, and `reference_params`
  are the frozen weights beside them, whatever the coefficient.

  Args:
    config: shape of the network.
    optimizer: made by `optimizer.make_optimizer`.
    settings: the loss.
    logprobs: `(params, shared, count, temperature=...) -> (logp, entropy)`, float32[P, n, count]. By default the
      decoder's own in float32; pass `functools.partial(decoder.token_logprobs, config, dtype=..., remat=True)` for a
      large model.
    lora: what the state's parameters are factors of, or None where they are whole.

  Returns:
    The update. Its metrics are those of `loss.policy_loss` and `optimizer.apply_gradients`, with `loss` and `tokens`.
    The value of `loss` is 0 on average with one update per sample (ratios are 1, advantages sum to zero); its
    gradient is not.

  Raises:
    ValueError: the settings contradict themselves; all problems at once.
  """
  if found := settings.problems():
    raise ValueError("loss settings: " + "; ".join(found))
  logprobs = functools.partial(
    logprobs or functools.partial(decoder.token_logprobs, config), temperature=settings.temperature
  )

  def update(state: TrainState, reference_params: Params | None, batch: Batch) -> tuple[TrainState, Metrics]:
    needed = settings.kl_coefficient != 0 or lora is not None
    assert (reference_params is not None) == needed, "a reference policy goes with a KL coefficient, or with LoRA"
    whole = functools.partial(low_rank.whole, lora, reference_params)
    reference = reference_params if settings.kl_coefficient else None
    loss_fn = functools.partial(_loss, logprobs, settings, reference, whole)
    micro_batches, tokens = _weighted(batch, settings)
    loss, gradients, totals = accumulation.accumulate(loss_fn, state.params, micro_batches)
    state, metrics = optimizers.apply_gradients(optimizer, state, gradients, tokens)
    return state, {"loss": loss, "tokens": tokens, **totals.sums, **totals.maxima, **metrics}

  return StepFunction(update)


def make_logprobs(
  config: DecoderConfig, count: int, temperature: float = 1.0, logprobs: Callable | None = None
) -> Callable:
  """The compiled `(params, shared) -> logp float32[P, n, count]` of the trainer, for `Batch.old_logp`."""
  logprobs = logprobs or functools.partial(decoder.token_logprobs, config)
  return jax.jit(lambda params, shared: logprobs(params, shared, count, temperature=temperature)[0])


def _weighted(batch: Batch, settings: LossSettings) -> tuple[tuple[Batch, jax.Array, jax.Array], jax.Array]:
  """((batch with a micro-batch axis, loss weights, metric shares), tokens), all counted over the whole batch."""
  if batch.loss_mask.ndim == 3:
    batch = jax.tree.map(lambda leaf: leaf[None], batch)
  mask = batch.loss_mask.astype(bool) & batch.shared.suffix_mask[..., -batch.loss_mask.shape[-1] :]
  batch = dataclasses.replace(batch, loss_mask=mask)
  weights = token_weights(mask, settings.normalisation, settings.constant_length)
  return (batch, weights, token_weights(mask, "token")), jnp.sum(mask, dtype=jnp.float32)


def _loss(
  logprobs: Callable,
  settings: LossSettings,
  reference_params: Params | None,
  whole: Callable[[Params], Params],
  params: Params,
  micro: tuple[Batch, jax.Array, jax.Array],
) -> tuple[jax.Array, Totals]:
  batch, weight, share = micro
  logp, entropy = logprobs(whole(params), batch.shared, weight.shape[-1])
  reference_logp = None
  if reference_params is not None:
    reference_logp = jax.lax.stop_gradient(logprobs(reference_params, batch.shared, weight.shape[-1])[0])
  tokens = Tokens(
    logp=logp,
    entropy=entropy,
    mask=batch.loss_mask,
    weight=weight,
    share=share,
    advantages=batch.advantages,
    old_logp=batch.old_logp,
    reference_logp=reference_logp,
    sampler_logp=batch.sampler_logp,
  )
  return policy_loss(tokens, settings)


def check_first_step(metrics: Mapping[str, Any]) -> bool:
  """Proves on the metrics of a run's first update that it trains the right policy and trains at all.

  Call it on every update until it returns True: a batch without tokens or with nothing but flat groups proves nothing.

  Returns:
    True where the update moved the weights; False where this batch held nothing to learn from.

  Raises:
    RuntimeError: the policy differs from the reference before it was ever trained; or there was something to learn
      from and the weights did not move or the gradient is not finite.
  """
  kl = max((abs(float(metrics[name])) for name in ("kl", "kl_k1", "kl_k2") if name in metrics), default=0.0)
  grad_norm, moved = float(metrics["grad_norm"]), float(metrics["update_norm"])
  if not kl < FIRST_KL:
    raise RuntimeError(
      f"before the first update the KL to the reference policy is {kl:.3g}, not below {FIRST_KL:g}: the reference "
      "is not the starting policy (other weights, another temperature or another prompt). "
      "Pass a copy of the starting weights."
    )
  if not jnp.isfinite(grad_norm):
    raise RuntimeError(f"the first gradient has norm {grad_norm}: a log-probability or an advantage is not finite.")
  if moved > 0:
    return True
  if float(metrics["tokens"]) == 0 or float(metrics["advantage_abs"]) == 0:
    return False
  raise RuntimeError(
    f"the first update moved no weight (gradient norm {grad_norm:.3g}, mean |advantage| "
    f"{float(metrics['advantage_abs']):.3g}): the learning rate is 0 or below the weights' "
    "resolution, or nothing is trainable."
  )
