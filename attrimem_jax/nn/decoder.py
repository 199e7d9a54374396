"""The decoder, on the layout that everything here shares: prefixes that are read once, and suffixes that follow them.

`Block` is the network: one Flax NNX module for Qwen3, Qwen2 and Llama-type layers. Its parameters live in a plain dict
with the layers stacked on axis 0, and every function below scans over that axis. A prefix [P, Tp] is read once and its
keys are never copied, however many suffixes [P, n, Ts] attend to them.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from attrimem_jax.nn.attention import Causal, attend, causal, rotary, rotate
from attrimem_jax.nn.config import DecoderConfig

Array = Any  # a jax.Array inside compiled functions, a NumPy array on its way there
Params = dict[str, Any]
Rope = tuple[jax.Array, jax.Array]
Caches = tuple[jax.Array, ...]


@flax.struct.dataclass
class Shared:
  """Prefixes and the suffixes that continue them.

  Prefixes are padded on the right. A suffix is a prompt padded on the left and then a completion padded on the right,
  so that the completions of all rows start at the same column; positions count real tokens only, so padding never
  changes a number.

  Attributes:
    prefix: int32 [P, Tp], at least one real token each.
    prefix_mask: bool [P, Tp].
    suffix: int32 [P, n, Ts].
    suffix_mask: bool [P, n, Ts].
    prefix_keep: [P, n, Tp] or None; False hides a prefix token from one suffix (its position stays).
    suffix_keep: [P, n, Ts] or None; False hides a suffix token from all others (its position stays).

  Instead of bool, either may be float in [0, 1]: the factor of a token's weight in the attention of those that it would
  be hidden from.
  """

  prefix: Array
  prefix_mask: Array
  suffix: Array
  suffix_mask: Array
  prefix_keep: Array | None = None
  suffix_keep: Array | None = None


class Block(nnx.Module):
  """One pre-norm layer: grouped-query attention, then SwiGLU.

  A matrix `q` may have low-rank factors `q_lora_a` and `q_lora_b` beside it (`lora.Lora.join`), as may all others.
  """

  def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, factors: tuple[str, ...] = ()):
    D, N, K, H, F = config.width, config.heads, config.kv_heads, config.head_size, config.hidden

    def normal(shape, fan_in):
      return nnx.Param(jax.random.normal(rngs.params(), shape) * fan_in**-0.5)

    self.config = config
    self.attention_norm = nnx.Param(jnp.ones(D))
    self.q, self.k, self.v = normal((D, N, H), D), normal((D, K, H), D), normal((D, K, H), D)
    self.o = normal((N, H, D), N * H * 2 * config.layers)
    if config.qk_norm:
      self.q_norm, self.k_norm = nnx.Param(jnp.ones(H)), nnx.Param(jnp.ones(H))
    if config.qkv_bias:
      self.q_bias, self.k_bias, self.v_bias = (nnx.Param(jnp.zeros((heads, H))) for heads in (N, K, K))
    self.mlp_norm = nnx.Param(jnp.ones(D))
    self.gate, self.up = normal((D, F), D), normal((D, F), D)
    self.down = normal((F, D), F * 2 * config.layers)
    for name in factors:
      setattr(self, name, nnx.Param(jnp.zeros(())))  # a place; the parameters bring their own shapes

  def qkv(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [..., D] to q [..., N, H], k and v [..., K, H], rotated."""
    x = rms_norm(x, self.attention_norm[...], self.config.norm_eps)
    q, k, v = (self._project(x, name) for name in "qkv")
    if self.config.qkv_bias:
      q, k, v = (a + b[...].astype(a.dtype) for a, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
    if self.config.qk_norm:
      q = rms_norm(q, self.q_norm[...], self.config.norm_eps)
      k = rms_norm(k, self.k_norm[...], self.config.norm_eps)
    return rotate(q, rope), rotate(k, rope), v

  def finish(self, x: jax.Array, heads: jax.Array) -> jax.Array:
    """Adds the attention's result `heads` [..., N, H] and the feed-forward to the residual x [..., D]."""
    x = x + self._project(heads, "o", axes=2)
    y = rms_norm(x, self.mlp_norm[...], self.config.norm_eps)
    return x + self._project(nnx.silu(self._project(y, "gate")) * self._project(y, "up"), "down")

  def _project(self, x, name, axes=1):
    out = _dense(x, getattr(self, name)[...], axes)
    if not hasattr(self, f"{name}_lora_a"):
      return out
    a, b = (getattr(self, f"{name}_lora_{side}")[...] for side in "ab")
    return out + _dense(_dense(x, a, axes), b)


def _dense(x, weight, axes=1):
  """Contracts the last `axes` axes of x with the first of `weight`, as one plain matrix product.

  The leading axes are flattened first: XLA's CPU backend computes the weight gradient of a matrix product over several
  leading axes two to three times slower than that of a flat one.
  """
  inner = math.prod(weight.shape[:axes])
  flat = x.reshape(-1, inner)
  out = _rounded(flat, weight) if hasattr(weight, "qvalue") else flat @ weight.reshape(inner, -1).astype(x.dtype)
  return out.reshape(*x.shape[: x.ndim - axes], *weight.shape[axes:])


def _rounded(x, weight):
  """x [T, D] times a matrix of `quantised.quantise`."""
  import qwix  # an extra: whoever made the matrix has it

  values, scale = weight.qvalue.reshape(x.shape[1], -1), weight.scale.reshape(1, -1)
  return qwix.dot(x, dataclasses.replace(weight, qvalue=values, scale=scale)).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """Root-mean-square norm, computed in float32, returned in x's dtype."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale
  return y.astype(x.dtype)


def init(config: DecoderConfig, key: jax.Array) -> Params:
  """Random float32 parameters; residual outputs are scaled down by the depth."""
  embed_key, layer_key, head_key = jax.random.split(key, 3)

  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
  def stack(layer_key):
    return Block(config, nnx.Rngs(layer_key))

  layers = nnx.to_pure_dict(nnx.split(stack(jax.random.split(layer_key, config.layers)))[1])
  params = {
    "embed": jax.random.normal(embed_key, (config.vocab_size, config.width)) * 0.02,
    "layers": layers,
    "norm": jnp.ones(config.width),
  }
  if not config.tied:
    params["head"] = jax.random.normal(head_key, (config.width, config.vocab_size)) * config.width**-0.5
  return params


def abstract(config: DecoderConfig) -> Params:
  """The shapes of `init`'s result, without computing it."""
  return jax.eval_shape(lambda: init(config, jax.random.key(0)))


@functools.cache
def _definition(config: DecoderConfig, factors: tuple[str, ...]):
  return nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0), factors)))[0]


def block(config: DecoderConfig, layer: Params) -> Block:
  """The module of one layer over that layer's slice of the stacked parameters."""
  return nnx.merge(_definition(config, tuple(sorted(name for name in layer if "_lora_" in name))), layer)


def forward(
  config: DecoderConfig,
  params: Params,
  batch: Shared,
  *,
  dtype=jnp.float32,
  remat=False,
  keep_cache=False,
  known: Caches | None = None,
) -> tuple[jax.Array, Caches | None]:
  """One differentiable pass over prefixes and suffixes.

  Args:
    known: keys and values of the prefixes [L, P, Tp, K, H], where they were read before: then suffixes alone are read.

  Returns:
    states: final hidden states of the suffixes after the last norm, float32 [P, n, Ts, D].
    caches: None, or with `keep_cache` (prefix k, prefix v [L, P, Tp, K, H], suffix k, suffix v [L, P, n, Ts, K, H]),
      without the first two where they were known.
  """
  prefix_rope, suffix_rope = _ropes(config, batch.prefix_mask, batch.suffix_mask)
  to_prefix, to_own = _masks(batch)

  def layer(streams, xs):
    (x, y), (weights, past) = streams, xs
    net = block(config, weights)
    if past is None:
      q, k, v = net.qkv(x, prefix_rope)
      x = net.finish(x, causal(q, k, v, batch.prefix_mask))
    else:
      k, v = past
    q, own_k, own_v = net.qkv(y, suffix_rope)
    y = net.finish(y, attend(q, [(k, v, to_prefix)], [(own_k, own_v, to_own)]))
    kept = (own_k, own_v) if past else (k, v, own_k, own_v)
    return (x, y), kept if keep_cache else None

  streams = None if known else embed(params, batch.prefix, dtype), embed(params, batch.suffix, dtype)
  (_, y), caches = jax.lax.scan(
    jax.checkpoint(layer) if remat else layer, streams, (params["layers"], known), unroll=unroll(config)
  )
  return rms_norm(y.astype(jnp.float32), params["norm"], config.norm_eps), caches


def unroll(config: DecoderConfig) -> int:
  """How many layers a scan unrolls: all of a shallow network (faster on CPU), one of a deep one (compile time)."""
  return config.layers if config.layers <= 4 else 1


def hidden(config: DecoderConfig, params: Params, batch: Shared, *, dtype=jnp.float32, remat=False) -> jax.Array:
  """Final hidden states of the suffixes, after the last norm: float32 [P, n, Ts, D]."""
  return forward(config, params, batch, dtype=dtype, remat=remat)[0]


def embed(params: Params, ids: jax.Array, dtype) -> jax.Array:
  return params["embed"][ids].astype(dtype)


def _ropes(config: DecoderConfig, prefix_mask, suffix_mask):
  """Rotary tables of the two streams; a token's position is the number of real tokens before it."""
  prefix_position = jnp.cumsum(prefix_mask, axis=-1) - 1
  suffix_position = prefix_mask.sum(-1)[:, None, None] + jnp.cumsum(suffix_mask, axis=-1) - 1
  return tuple(
    rotary(jnp.maximum(position, 0), config.head_size, config.rope_theta)
    for position in (prefix_position, suffix_position)
  )


def _masks(batch: Shared) -> tuple[jax.Array, Causal]:
  """What suffix queries see: the prefix [P, n or 1, 1, Tp], and their own tokens up to themselves."""
  to_prefix = batch.prefix_mask[:, None, None, :]
  if batch.prefix_keep is not None:
    keep = batch.prefix_keep[:, :, None, :]
    to_prefix = to_prefix & keep if keep.dtype == bool else jnp.where(to_prefix, keep, 0.0)
  own_keep = None if batch.suffix_keep is None else batch.suffix_keep[:, :, None, :]
  return to_prefix, Causal(batch.suffix_mask[:, :, None, :], own_keep)


def logits(params: Params, states: jax.Array, temperature=1.0) -> jax.Array:
  """float32 logits [..., V] of final hidden states [..., D], divided by the sampling temperature.

  Sampler and trainer both come here, so that the probability that a token was drawn with is the one it is trained with.
  """
  head = params["embed"].T if "head" not in params else params["head"]
  return jnp.einsum("...d,dv->...v", states, head, preferred_element_type=jnp.float32) / temperature


def token_logprobs(
  config: DecoderConfig,
  params: Params,
  batch: Shared,
  count: int,
  *,
  temperature: float = 1.0,
  dtype=jnp.float32,
  remat: bool = False,
  chunk: int = 1024,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies of the last `count` suffix columns (the completions).

  The head runs over chunks of `chunk` tokens whose logits are recomputed in the backward pass, so memory does not grow
  with tokens times vocabulary.

  Returns:
    (logp, entropy), float32 [P, n, count] each; 0 where the column is padding.
  """
  Ts = batch.suffix.shape[-1]
  assert 0 < count < Ts, f"count {count} must leave at least one of {Ts} columns to predict from"
  states = hidden(config, params, batch, dtype=dtype, remat=remat)[:, :, Ts - count - 1 : Ts - 1]
  targets, mask = batch.suffix[:, :, Ts - count :], batch.suffix_mask[:, :, Ts - count :]
  logp, entropy = _chunked(params, states.reshape(-1, config.width), targets.reshape(-1), temperature, chunk)
  logp, entropy = (jnp.where(mask, a.reshape(mask.shape), 0.0) for a in (logp, entropy))
  return logp, entropy


def _chunked(params, states, targets, temperature, chunk):
  tokens = len(targets)
  chunk = min(chunk, tokens)
  pad = -tokens % chunk
  states, targets = jnp.pad(states, ((0, pad), (0, 0))), jnp.pad(targets, (0, pad))

  @jax.checkpoint
  def one(_, xs):
    z = logits(params, xs[0], temperature)
    log_z = jax.nn.logsumexp(z, axis=-1)
    p = jnp.exp(z - log_z[:, None])
    chosen = jnp.take_along_axis(z, xs[1][:, None], axis=-1)[:, 0]
    return None, (chosen - log_z, log_z - jnp.sum(p * z, axis=-1))

  _, out = jax.lax.scan(one, None, (states.reshape(-1, chunk, states.shape[-1]), targets.reshape(-1, chunk)))
  logp, entropy = (a.reshape(-1)[:tokens] for a in out)
  return logp, entropy
