"""Sampling completions: prefixes are read once, prompts once per row, then one token per row and step until all stop.

The whole of it is one compiled program per shape while completions are short. Longer ones go through stages of twice
the length each: between two of them rows that have stopped leave the batch, and the keys of new tokens get twice the
room, so that little is spent on rows that stopped or on tokens that nobody has sampled yet. A row draws from its own
key, folded with the token's number, so what a row draws does not depend on the rows beside it. Log-probabilities are
those of the full distribution at the sampling temperature, as the trainer computes them, also where top-k or top-p
narrowed the choice.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import sharding
from attrimem_jax.nn.attention import attend, rotary
from attrimem_jax.nn.batching import Ids, bucket, pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Caches, Params, Shared, block, embed, forward, logits, rms_norm, unroll
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish

FIRST_STAGE = 128  # new tokens
WATCHED = 8  # new tokens between two looks of a watcher
Watch = Callable[[list[list[np.ndarray]]], np.ndarray]
"""Is told the ids of every row so far, [P][n], and says which rows to sample no further, bool [P, n]."""


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
  watch: Watch | None = None,
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
    watch: looks at what was sampled every `WATCHED` tokens, and may end rows. It changes no draw.

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
  static = (stop, sampling.top_k, sampling.top_p < 1)  # not top_p itself: each would be a program of its own
  shared, padded = sharding.spread((shared, padded), model.params)
  how = np.float32(sampling.temperature), np.float32(sampling.top_p)
  (width, limit), *stages = _stages(sampling.max_new_tokens, WATCHED if watch else None)
  begin = (model.config, width, bool(stages), jnp.dtype(dtype).name, *static, model.params)
  progress, context = _begin(*begin, shared, padded, *how, np.int32(limit))
  done, *found = sharding.fetch((progress.done, progress.ids, progress.logps, progress.lengths))
  place = np.broadcast_to(np.arange(rows), done.shape)  # where each row of the batch stood at first
  for width, limit in stages:
    if watch is not None:
      ids, _, lengths = found
      ended = np.ones(padded.shape[:2], bool)
      told = watch([[ids[p, i, : lengths[p, i]] for i in range(len(group))] for p, group in enumerate(prompts)])
      ended[:, : told.shape[1]] = told
      done = done | np.take_along_axis(ended, place, 1)
    if done.all():
      break
    order = np.argsort(done, axis=1, kind="stable")[:, : _halved(rows, int((~done).sum(1).max()))]
    rows, place = order.shape[1], np.take_along_axis(place, order, 1)
    progress, context = _go_on(
      model.config, width, *static, model.params, progress, context, done, order, *how, np.int32(limit)
    )
    done, *new = sharding.fetch((progress.done, progress.ids, progress.logps, progress.lengths))
    found = [_stored(old, some, place) for old, some in zip(found, new, strict=True)]
  ids, logps, lengths = found
  return [
    [_completion(ids[p, i], logps[p, i], lengths[p, i], stop) for i in range(len(group))]
    for p, group in enumerate(prompts)
  ]


def _stages(limit: int, every: int | None = None) -> list[tuple[int, int]]:
  """(room for new tokens, tokens sampled at its end) of each stage; of 300 tokens (128, 128), (256, 256), (384, 300).

  With `every`, a stage ends also after each so many tokens.
  """
  width = bucket(limit, 8)
  rooms = [FIRST_STAGE]
  while rooms[-1] < width:
    rooms.append(2 * rooms[-1])
  rooms[-1] = width
  ends = {*(min(room, limit) for room in rooms), *(range(every, limit, every) if every else ())}
  return [(next(room for room in rooms if room >= end), end) for end in sorted(ends)]


def _halved(rows: int, live: int) -> int:
  """`rows` halved as long as `live` rows still fit, so that few shapes are met."""
  while rows > 1 and -(-rows // 2) >= live:
    rows = -(-rows // 2)
  return rows


def _stored(old: np.ndarray, new: np.ndarray, place: np.ndarray) -> np.ndarray:
  """`old` [P, n, ...] with the rows of `new` at their places, as wide as these."""
  wide = np.zeros((*old.shape[:2], *new.shape[2:]), old.dtype)
  wide[(slice(None), slice(None), *(slice(size) for size in old.shape[2:]))] = old
  wide[np.arange(len(old))[:, None], place] = new
  return wide


def _completion(ids, logps, length, stop) -> Completion:
  ids, logps = ids[:length].copy(), logps[:length].copy()
  return Completion(ids, logps, Finish.STOP if length and ids[-1] in stop else Finish.LENGTH)


class _Progress(NamedTuple):
  """What changes while tokens are sampled; W is the room for new tokens.

  Attributes:
    t: tokens sampled so far, of a row that has not stopped.
    done: bool [P, n].
    states: float32 [P, n, D], from which the next token is drawn.
    ids, logps: [P, n, W].
    lengths: int32 [P, n].
    new_k, new_v: [L, P, n, W, K, H].
  """

  t: jax.Array
  done: jax.Array
  states: jax.Array
  ids: jax.Array
  logps: jax.Array
  lengths: jax.Array
  new_k: jax.Array
  new_v: jax.Array


class _Context(NamedTuple):
  """What was read before the first token.

  Attributes:
    caches: prefix k, prefix v [L, P, Tp, K, H], prompt k, prompt v [L, P, n, Ts, K, H].
    prefix_mask, prompt_mask: bool [P, Tp], [P, n, Ts].
    keys: uint32 [P, n, 2], from which rows draw.
  """

  caches: Caches
  prefix_mask: jax.Array
  prompt_mask: jax.Array
  keys: jax.Array


@functools.partial(jax.jit, static_argnums=range(7))
def _begin(
  config: DecoderConfig,
  width,
  more,
  dtype,
  stop,
  top_k,
  nucleus,
  params,
  shared: Shared,
  keys,
  temperature,
  top_p,
  limit,
):
  """Reads everything and samples up to `width` tokens; what a next stage (`more`) would need of it is returned too."""
  states, caches = forward(config, params, shared, dtype=jnp.dtype(dtype), keep_cache=True)
  P, n, _ = shared.suffix.shape
  assert caches is not None, "asked for"
  context = _Context(caches, shared.prefix_mask, shared.suffix_mask, keys)
  ids, lengths = jnp.zeros((P, n, width), jnp.int32), jnp.zeros((P, n), jnp.int32)
  empty = jnp.zeros((config.layers, P, n, width, config.kv_heads, config.head_size), jnp.dtype(dtype))
  done = ~jnp.any(shared.suffix_mask, axis=-1)
  start = _Progress(jnp.int32(0), done, states[:, :, -1], ids, ids.astype(jnp.float32), lengths, empty, empty)
  progress = _sample(config, stop, top_k, top_p if nucleus else None, params, context, start, temperature, limit)
  nothing = jnp.zeros(())
  return (progress, context) if more else (progress._replace(new_k=nothing, new_v=nothing, states=nothing), nothing)


@functools.partial(jax.jit, static_argnums=range(5))
def _go_on(config, width, stop, top_k, nucleus, params, progress, context, done, order, temperature, top_p, limit):
  """Keeps the rows `order` [P, m], gives new tokens `width` columns, and samples on; `done` [P, n] is known outside."""

  def rows(a, axis=1):
    shape = [1] * a.ndim
    shape[axis - 1], shape[axis] = order.shape
    return jnp.take_along_axis(a, order.reshape(shape), axis)

  def wider(a, axis):
    return jnp.pad(a, [(0, width - a.shape[axis] if i == axis else 0) for i in range(a.ndim)])

  prefix_k, prefix_v, prompt_k, prompt_v = context.caches
  context = _Context(
    (prefix_k, prefix_v, rows(prompt_k, 2), rows(prompt_v, 2)),
    context.prefix_mask,
    rows(context.prompt_mask),
    rows(context.keys),
  )
  progress = _Progress(
    progress.t,
    rows(done),
    rows(progress.states),
    wider(rows(progress.ids), 2),
    wider(rows(progress.logps), 2),
    rows(progress.lengths),
    wider(rows(progress.new_k, 2), 3),
    wider(rows(progress.new_v, 2), 3),
  )
  top_p = top_p if nucleus else None
  return _sample(config, stop, top_k, top_p, params, context, progress, temperature, limit), context


def _sample(config: DecoderConfig, stop, top_k, top_p, params, context: _Context, start: _Progress, temperature, limit):
  """Samples until every row has stopped, or has `limit` tokens, or the room is full."""
  width = start.ids.shape[-1]
  first = context.prefix_mask.sum(-1)[:, None] + context.prompt_mask.sum(-1)
  stop_ids = jnp.array(stop, jnp.int32)
  to_prefix = context.prefix_mask[:, None, None, :]
  to_prompt = context.prompt_mask[:, :, None, :]
  dtype = start.new_k.dtype

  def go_on(now: _Progress):
    return (now.t < jnp.minimum(limit, width)) & ~jnp.all(now.done)

  def one(now: _Progress):
    t, done = now.t, now.done
    token, logp = _draw(params, now.states, context.keys, t, temperature, top_k, top_p)
    ids = jax.lax.dynamic_update_index_in_dim(now.ids, jnp.where(done, 0, token), t, 2)
    logps = jax.lax.dynamic_update_index_in_dim(now.logps, jnp.where(done, 0.0, logp), t, 2)
    lengths = now.lengths + ~done
    done = done | jnp.any(token[..., None] == stop_ids, axis=-1)
    rope = rotary((first + t)[..., None], config.head_size, config.rope_theta)
    to_new = (jnp.arange(width) < t)[None, None, None, :]

    def layer(x, xs):
      weights, (prefix_k, prefix_v, prompt_k, prompt_v), past_k, past_v = xs
      net = block(config, weights)
      q, k, v = net.qkv(x, rope)
      own = [(prompt_k, prompt_v, to_prompt), (past_k, past_v, to_new), (k, v, jnp.ones((1, 1, 1, 1), bool))]
      return net.finish(x, attend(q, [(prefix_k, prefix_v, to_prefix)], own)), (k, v)

    x = embed(params, token, dtype)[:, :, None]
    layers = (params["layers"], context.caches, now.new_k, now.new_v)
    x, (k, v) = jax.lax.scan(layer, x, layers, unroll=unroll(config))
    new_k, new_v = (jax.lax.dynamic_update_slice_in_dim(a, b, t, 3) for a, b in ((now.new_k, k), (now.new_v, v)))
    states = rms_norm(x[:, :, 0].astype(jnp.float32), params["norm"], config.norm_eps)
    return _Progress(t + 1, done, states, ids, logps, lengths, new_k, new_v)

  return jax.lax.while_loop(go_on, one, start)


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
  """Sets logits outside the top-k, or outside the smallest set with mass top-p (None: all), to -inf."""
  if top_k:
    z = jnp.where(z < jax.lax.top_k(z, min(top_k, z.shape[-1]))[0][..., -1:], -jnp.inf, z)
  if top_p is not None:
    ordered = jnp.sort(z, axis=-1, descending=True)
    mass_before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
    least = jnp.min(jnp.where(mass_before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    z = jnp.where(z < least, -jnp.inf, z)
  return z
