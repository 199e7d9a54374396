"""Sampling completions: prefixes are read once, prompts once per row, then one token per row and step until all stop.

The whole of it is one compiled program per shape. A row draws from its own key, folded with the token's number, so what
a row draws does not depend on the rows beside it. Log-probabilities are those of the full distribution at the sampling
temperature, as the trainer computes them, also where top-k or top-p narrowed the choice.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import sharding
from attrimem_jax.nn.attention import attend, rotary
from attrimem_jax.nn.batching import Ids, bucket, pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params, Shared, block, embed, forward, logits, rms_norm, unroll
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish


class Model(Protocol):
  """A decoder with its parameters and its tokenizer, such as `io.models.LanguageModel`."""

  @property
  def name(self) -> str: ...
  @property
  def config(self) -> DecoderConfig: ...
  @property
  def params(self) -> Params: ...
  @property
  def tokenizer(self) -> Tokenizer: ...


@dataclasses.dataclass(frozen=True)
class Completion:
  """What one row sampled. `ids` ends with the stop token if one was sampled; `logps` float32, one per id."""

  ids: np.ndarray
  logps: np.ndarray
  finish: Finish


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How to draw. Temperature 0 is greedy. `top_k` 0 and `top_p` 1 leave the distribution whole, as training needs."""

  max_new_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def complete(
  model: Model,
  prefixes: Sequence[Ids],
  prompts: Sequence[Sequence[Ids]],
  keys: np.ndarray,
  sampling: Sampling,
  *,
  rows: int | None = None,
  prompt_width: int | None = None,
  dtype=jnp.float32,
  step: int = 16,
) -> list[list[Completion]]:
  """Samples one completion for each prompt.

  Args:
    model: config, params and tokenizer (`io.models.LanguageModel`); the tokenizer's stop ids end a row.
    prefixes: P prefixes.
    prompts: for each prefix, the prompts that follow it.
    keys: uint32 [P, n, 2], the raw key of each row (n at least the longest list).
    sampling: temperature and limits.
    rows: pads every prefix to this many rows, to keep shapes few.
    prompt_width: pads prompts to this many tokens; by default to the bucket of the longest.
    step: the granularity of padded widths.

  Raises:
    ValueError: prefix, prompt and new tokens together exceed the model's positions.
  """
  longest = max(len(a) + len(p) for a, ps in zip(prefixes, prompts, strict=True) for p in ps)
  if longest + sampling.max_new_tokens > model.config.max_positions:
    raise ValueError(
      f"a prompt of {longest} tokens plus {sampling.max_new_tokens} new ones exceeds the {model.config.max_positions} "
      f"positions of {model.name}; shorten the prompt or lower max_new_tokens"
    )
  rows = rows or max(map(len, prompts))
  shared = pack(
    prefixes,
    [[(p, ()) for p in ps] for ps in prompts],
    prompt_width=prompt_width,
    completion_width=0,
    rows=rows,
    step=step,
  )
  padded = np.zeros((len(prefixes), rows, 2), np.uint32)
  padded[:, : keys.shape[1]] = keys[:, :rows]
  stop = tuple(model.tokenizer.stop_ids)
  static = (bucket(sampling.max_new_tokens, 8), stop, sampling.top_k, sampling.top_p, jnp.dtype(dtype).name)
  ids, logps, lengths = sharding.fetch(
    _generate(
      model.config,
      *static,
      model.params,
      *sharding.spread((shared, padded), model.params),
      np.float32(sampling.temperature),
      np.int32(sampling.max_new_tokens),
    )
  )
  return [
    [_completion(ids[p, i], logps[p, i], lengths[p, i], stop) for i in range(len(group))]
    for p, group in enumerate(prompts)
  ]


def _completion(ids, logps, length, stop) -> Completion:
  ids, logps = ids[:length].copy(), logps[:length].copy()
  return Completion(ids, logps, Finish.STOP if length and ids[-1] in stop else Finish.LENGTH)


@functools.partial(jax.jit, static_argnums=range(6))
def _generate(
  config: DecoderConfig, width, stop, top_k, top_p, dtype, params, shared: Shared, keys, temperature, limit
):
  """Returns ids int32 [P, n, width], logps float32 [P, n, width] and lengths int32 [P, n]."""
  states, caches = forward(config, params, shared, dtype=jnp.dtype(dtype), keep_cache=True)
  P, n, _ = shared.suffix.shape
  first = shared.prefix_mask.sum(-1)[:, None] + shared.suffix_mask.sum(-1)
  stop_ids = jnp.array(stop, jnp.int32)
  to_prefix = shared.prefix_mask[:, None, None, :]
  to_prompt = shared.suffix_mask[:, :, None, :]
  layer_count, K, H = config.layers, config.kv_heads, config.head_size
  empty = jnp.zeros((layer_count, P, n, width, K, H), jnp.dtype(dtype))

  def go_on(carry):
    t, done, *_ = carry
    return (t < limit) & ~jnp.all(done)

  def one(carry):
    t, done, states, ids, logps, lengths, new_k, new_v = carry
    token, logp = _draw(params, states, keys, t, temperature, top_k, top_p)
    ids = jax.lax.dynamic_update_index_in_dim(ids, jnp.where(done, 0, token), t, 2)
    logps = jax.lax.dynamic_update_index_in_dim(logps, jnp.where(done, 0.0, logp), t, 2)
    lengths = lengths + ~done
    done = done | jnp.any(token[..., None] == stop_ids, axis=-1)
    rope = rotary((first + t)[..., None], H, config.rope_theta)
    to_new = (jnp.arange(width) < t)[None, None, None, :]

    def layer(x, xs):
      weights, (prefix_k, prefix_v, prompt_k, prompt_v), past_k, past_v = xs
      net = block(config, weights)
      q, k, v = net.qkv(x, rope)
      own = [(prompt_k, prompt_v, to_prompt), (past_k, past_v, to_new), (k, v, jnp.ones((1, 1, 1, 1), bool))]
      return net.finish(x, attend(q, [(prefix_k, prefix_v, to_prefix)], own)), (k, v)

    x = embed(params, token, jnp.dtype(dtype))[:, :, None]
    x, (k, v) = jax.lax.scan(layer, x, (params["layers"], caches, new_k, new_v), unroll=unroll(config))
    new_k, new_v = (jax.lax.dynamic_update_slice_in_dim(a, b, t, 3) for a, b in ((new_k, k), (new_v, v)))
    states = rms_norm(x[:, :, 0].astype(jnp.float32), params["norm"], config.norm_eps)
    return t + 1, done, states, ids, logps, lengths, new_k, new_v

  done = ~jnp.any(shared.suffix_mask, axis=-1)
  ids = jnp.zeros((P, n, width), jnp.int32)
  start = (
    jnp.int32(0),
    done,
    states[:, :, -1],
    ids,
    ids.astype(jnp.float32),
    jnp.zeros((P, n), jnp.int32),
    empty,
    empty,
  )
  _, _, _, ids, logps, lengths, _, _ = jax.lax.while_loop(go_on, one, start)
  return ids, logps, lengths


def _draw(params, states, keys, t, temperature, top_k, top_p):
  """One token per row [P, n] and its log-probability; temperature 0 takes the likeliest."""
  greedy = temperature <= 0
  z = logits(params, states, jnp.where(greedy, 1.0, temperature))
  choice = _narrow(z, top_k, top_p)

  def uniform(key):
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), t))

  weights = jnp.exp(choice - jnp.max(z, axis=-1, keepdims=True))
  drawn = _invert(weights, jax.vmap(jax.vmap(uniform))(keys))
  token = jnp.where(greedy, jnp.argmax(choice, axis=-1), drawn).astype(jnp.int32)
  chosen = jnp.take_along_axis(z, token[..., None], axis=-1)[..., 0]
  return token, chosen - jax.nn.logsumexp(z, axis=-1)


def _invert(weights, u, width=256):
  """The first index whose cumulative share of `weights` [..., V] exceeds u [...] in [0, 1); never one of weight 0.

  One number per row is drawn, not one per word of the vocabulary. Sums are taken over blocks and then inside one block,
  which keeps them exact to some 1e-7 of the whole.
  """
  padded = jnp.pad(weights, [(0, 0)] * u.ndim + [(0, -weights.shape[-1] % width)])
  blocks = padded.reshape(*u.shape, -1, width)
  sums = blocks.sum(-1)
  upto = jnp.cumsum(sums, axis=-1)
  target = u * upto[..., -1]
  place = jnp.argmax(upto > target[..., None], axis=-1)[..., None]
  before = jnp.where(place == 0, 0.0, jnp.take_along_axis(upto, jnp.maximum(place - 1, 0), axis=-1))
  inside = jnp.take_along_axis(blocks, place[..., None], axis=-2)[..., 0, :]
  beyond = jnp.cumsum(inside, axis=-1) > target[..., None] - before
  # Rounding may leave the target above the last sum of its block: then the last index that has weight.
  last = width - 1 - jnp.argmax((inside > 0)[..., ::-1], axis=-1)
  return place[..., 0] * width + jnp.where(beyond.any(-1), jnp.argmax(beyond, axis=-1), last)


def _narrow(z, top_k, top_p):
  """Sets logits outside the top-k, or outside the smallest set with mass top-p, to -inf."""
  if top_k:
    z = jnp.where(z < jax.lax.top_k(z, min(top_k, z.shape[-1]))[0][..., -1:], -jnp.inf, z)
  if top_p < 1:
    ordered = jnp.sort(z, axis=-1, descending=True)
    mass_before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
    least = jnp.min(jnp.where(mass_before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    z = jnp.where(z < least, -jnp.inf, z)
  return z
