"""The clipped policy loss with a KL term, on arrays of per-token log-probabilities. Pure, float32, no network.

Symbols of the GRPO papers: ρ = π/π_old is `ratio`, ε `clip_low` and `clip_high`, β `kl_coefficient`, Â `advantages`.
The KL to the starting policy is estimated from d = log π_ref − log π of the sampled tokens:

  k1 = −d             unbiased in value; as a loss its gradient is zero on average, so it regularises nothing
  k2 = d²/2           biased in value, right gradient on policy
  k3 = exp(d) − d − 1 unbiased, never negative, low variance; what the loss uses

Left out: sequence-level ratios, dual clipping, entropy bonus.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from attrimem_jax.rl.accumulation import Totals

NORMALISATIONS = ("token", "sequence", "constant")


@dataclasses.dataclass(frozen=True)
class LossSettings:
  """What the loss is made of.

  Attributes:
    clip_low, clip_high: the ratio is clipped to [1 − clip_low, 1 + clip_high].
    kl_coefficient: weight of k3 in the loss; 0 leaves the reference policy out altogether.
    normalisation: what a token's loss is divided by. "token": all tokens of the batch. "sequence": its row's tokens,
      times the number of rows (every row weighs the same). "constant": `constant_length` times the number of rows
      (Dr. GRPO), which rewards neither short nor long rows.
    constant_length: for "constant"; usually the longest completion that may be sampled.
    log_ratio_limit: log-ratios are clamped to at most this before exp, which would overflow float32 at 88.
    temperature: what the completions were sampled at. The trainer's log-probabilities use the same.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  kl_coefficient: float = 0.02
  normalisation: str = "token"
  constant_length: int = 0
  log_ratio_limit: float = 10.0
  temperature: float = 1.0

  def problems(self) -> list[str]:
    """Everything wrong with these settings, each as "name: what, and how to mend it"."""
    found = []
    if self.normalisation not in NORMALISATIONS:
      found.append(f"normalisation: {self.normalisation!r} is unknown; choose one of {', '.join(NORMALISATIONS)}")
    if self.normalisation == "constant" and self.constant_length < 1:
      found.append(f"constant_length: {self.constant_length} must be at least 1 with normalisation 'constant'")
    if not 0 <= self.clip_low < 1:
      found.append(f"clip_low: {self.clip_low} must be in [0, 1)")
    for name in ("clip_high", "kl_coefficient"):
      if getattr(self, name) < 0:
        found.append(f"{name}: {getattr(self, name)} is negative; give 0 or more")
    for name in ("log_ratio_limit", "temperature"):
      if getattr(self, name) <= 0:
        found.append(f"{name}: {getattr(self, name)} must be positive")
    return found


@struct.dataclass
class Tokens:
  """What the loss knows of each sampled token; float32[..., C] unless noted, any leading axes.

  Attributes:
    logp, entropy: of the policy that is being trained.
    mask: bool; the only tokens that exist. What the other columns hold is never looked at.
    weight: a token's share of the loss, from `token_weights` over the *whole* batch.
    share: a token's share of the metrics: mask / tokens of the whole batch.
    advantages: Â.
    old_logp: of the policy that sampled, as the trainer computes it; None where the policy has not moved since.
    reference_logp: of the starting policy; None without a KL term.
    sampler_logp: as the sampler reported it; None if unknown. A diagnostic only.
  """

  logp: jax.Array
  entropy: jax.Array
  mask: jax.Array
  weight: jax.Array
  share: jax.Array
  advantages: jax.Array
  old_logp: jax.Array | None = None
  reference_logp: jax.Array | None = None
  sampler_logp: jax.Array | None = None


def token_weights(mask: jax.Array, normalisation: str, constant_length: int = 0) -> jax.Array:
  """Each token's share of the loss, float32 like `mask` bool[..., rows, C]; masked tokens get 0.

  The loss is Σ weight · token loss, so numerator and denominator cannot count different tokens. Give the mask of the
  whole
  optimisation batch (under jit: of all devices and hosts), never that of a micro-batch. Rows without a token count
  nowhere.
  """
  tokens_of_row = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32)
  rows = jnp.sum(tokens_of_row > 0, dtype=jnp.float32)
  denominator = {
    "token": jnp.sum(tokens_of_row),
    "sequence": tokens_of_row * rows,
    "constant": rows * constant_length,
  }[normalisation]
  return mask / jnp.maximum(denominator, 1.0)


def k1(d: jax.Array) -> jax.Array:
  return -d


def k2(d: jax.Array) -> jax.Array:
  return 0.5 * d * d


def k3(d: jax.Array, limit: float = 10.0) -> jax.Array:
  """exp(d) − d − 1 with d clamped from above, before exp: clamped after, the value is fine and the gradient is NaN.

  There is no clamp from below. exp cannot overflow there, and the slope of −1 is what pulls back a policy that has
  moved far.
  """
  d = jnp.minimum(d, limit)
  return jnp.exp(d) - d - 1.0


def policy_loss(tokens: Tokens, settings: LossSettings) -> tuple[jax.Array, Totals]:
  """Σ weight · (−min(ρ Â, clip(ρ) Â) + β k3), with its metrics.

  Returns:
    (loss, totals). Sums are shares, so that summed over all micro-batches they are means over the batch's tokens:
    `ratio_mean`, `clip_fraction` (tokens where the clip bounds the loss) with its parts `clip_low_fraction` and
    `clip_high_fraction`, `clamped_fraction`, `entropy`, `advantage_abs`, and where known `kl` (k3), `kl_k1`, `kl_k2`,
    `sampler_gap_mean`, `sampler_gap_over_tenth`. Maxima: `ratio_max`, `log_ratio_abs_max`, `kl_max`, `sampler_gap_max`.
  """
  # Masked columns are neutralised before any arithmetic: 0 · inf in a backward pass is NaN, whatever is masked
  # afterwards.
  logp = jnp.where(tokens.mask, tokens.logp.astype(jnp.float32), 0.0)
  advantages = jnp.where(tokens.mask, tokens.advantages.astype(jnp.float32), 0.0)
  old_logp = jax.lax.stop_gradient(_or(tokens.old_logp, logp, tokens.mask))

  log_ratio = logp - old_logp
  ratio = jnp.exp(jnp.minimum(log_ratio, settings.log_ratio_limit))
  clipped = jnp.clip(ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
  surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
  loss = -jnp.sum(tokens.weight * surrogate)

  def mean(values: jax.Array) -> jax.Array:
    return jnp.sum(tokens.share * values)

  clamped = log_ratio > settings.log_ratio_limit
  bounded = clipped * advantages < ratio * advantages
  sums = {
    "ratio_mean": mean(ratio),
    "clip_fraction": mean(bounded),
    "clip_low_fraction": mean(bounded & (ratio < 1)),
    "clip_high_fraction": mean(bounded & (ratio > 1)),
    "entropy": mean(jnp.where(tokens.mask, tokens.entropy, 0.0)),
    "advantage_abs": mean(jnp.abs(advantages)),
  }
  maxima = {"ratio_max": jnp.max(jnp.where(tokens.mask, ratio, 0.0)), "log_ratio_abs_max": jnp.max(jnp.abs(log_ratio))}
  if tokens.reference_logp is not None:
    d = jax.lax.stop_gradient(_or(tokens.reference_logp, logp, tokens.mask)) - logp
    loss += settings.kl_coefficient * jnp.sum(tokens.weight * k3(d, settings.log_ratio_limit))
    sums |= {"kl": mean(k3(d, settings.log_ratio_limit)), "kl_k1": mean(k1(d)), "kl_k2": mean(k2(d))}
    maxima["kl_max"] = jnp.max(k3(d, settings.log_ratio_limit))
    clamped |= d > settings.log_ratio_limit
  if tokens.sampler_logp is not None:
    gap = jnp.abs(_or(tokens.sampler_logp, logp, tokens.mask) - logp)
    sums |= {"sampler_gap_mean": mean(gap), "sampler_gap_over_tenth": mean(gap > 0.1)}
    maxima["sampler_gap_max"] = jnp.max(gap)
  sums["clamped_fraction"] = mean(clamped)
  return loss, jax.lax.stop_gradient(Totals(sums, maxima))


def _or(given: jax.Array | None, logp: jax.Array, mask: jax.Array) -> jax.Array:
  """`given` where the mask is set; the policy's own value, whose difference is 0, elsewhere and if there is none."""
  return logp if given is None else jnp.where(mask, given.astype(jnp.float32), logp)
