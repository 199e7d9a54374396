"""Sampling completions: prefixes are read once, prompts once per row, then one token per row and step until all stop.

The whole of it is one compiled program per shape while completions are short. Longer ones go through rounds in which
the keys of new tokens get twice the room each time, so that nothing is spent on tokens that nobody has sampled yet.
Between two rounds rows that have stopped leave the batch, and rows that wait in the queue of their prefix enter: a
round ends as soon as a quarter of the places is free for them. A row draws from its own key, folded with the token's
number, so what a row draws does not depend on the rows beside it. Log-probabilities are those of the full distribution
at the sampling temperature, as the trainer computes them, also where top-k or top-p narrowed the choice.
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
from attrimem_jax.nn.decoder import Params, Shared, block, embed, forward, logits, rms_norm, unroll
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish

FIRST_ROOM = 128  # new tokens
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
  at_once: int | None = None,
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
    at_once: the most rows of a prefix that are in the batch together; the others wait. By default all.
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
  ids, logps, lengths = _run(model, shared, padded, sampling, jnp.dtype(dtype).name, min(rows, at_once or rows), watch)
  stop = tuple(model.tokenizer.stop_ids)
  return [
    [_completion(ids[p, i], logps[p, i], lengths[p, i], stop) for i in range(len(group))]
    for p, group in enumerate(prompts)
  ]


def _run(
  model: Model,
  shared: Shared,
  keys: np.ndarray,
  sampling: Sampling,
  dtype: str,
  places: int,
  watch: Watch | None,
):
  """Samples all rows, `places` of each prefix at a time; returns ids and logps [P, n + 1, W] and lengths [P, n + 1].

  The last row is where padding goes.
  """
  P, n, _ = keys.shape
  config, params, limit = model.config, model.params, sampling.max_new_tokens
  static = (config, tuple(model.tokenizer.stop_ids), sampling.top_k, sampling.top_p < 1)  # not top_p: few programs
  draw = (np.float32(sampling.temperature), np.float32(sampling.top_p), np.int32(limit))
  widths, few = _widths(bucket(limit, 8)), max(1, places // 4)
  found = [np.zeros((P, n + 1, widths[-1]), kind) for kind in (np.int32, np.float32)]
  found.append(np.zeros((P, n + 1), np.int32))
  real = shared.suffix_mask.any(-1)  # padding stands last
  queued = np.full(P, places)  # rows of each prefix that have left the queue
  waiting = np.maximum(real.sum(1) - places, 0)
  place = np.broadcast_to(np.arange(places), (P, places))  # whose each row of the batch is

  def until(live) -> np.int32:  # as many as leave a quarter of the places to those that wait; 0 if nobody does
    return np.int32(live.sum() - np.minimum(waiting, few).sum() if waiting.any() else 0)

  batch = dataclasses.replace(shared, suffix=shared.suffix[:, :places], suffix_mask=shared.suffix_mask[:, :places])
  inputs = sharding.spread((batch, keys[:, :places]), params)
  more = len(widths) > 1 or places < n or watch is not None

  def pause(used: int) -> np.int32:
    return np.int32(used + WATCHED if watch else widths[-1])

  stops = until(real[:, :places]), pause(0)
  progress, rows, prefix = _begin(*static, widths[0], more, dtype, params, *inputs, *draw, *stops)
  while True:
    done, *new = sharding.fetch((progress.done, progress.ids, progress.logps, progress.lengths))
    for old, some in zip(found, new, strict=True):
      index = (np.arange(P)[:, None], place)
      old[(*index, slice(some.shape[2])) if some.ndim > 2 else index] = some
    if watch is not None:
      done = done | np.take_along_axis(_ended(watch, found, real), place, 1)
      progress = progress._replace(done=sharding.spread(done, params))
    if done.all() and not waiting.any():
      return found
    parts, used = [(progress, rows)], int(np.where(done, 0, new[2]).max())
    while (enter := np.minimum(np.minimum(waiting, done.sum(1) - (len(parts) - 1) * few), few).clip(0)).any():
      chosen = np.where(np.arange(few) < enter[:, None], queued[:, None] + np.arange(few), n)
      some = np.minimum(chosen, n - 1)[..., None]
      suffix, mask, key = (np.take_along_axis(a, some, 1) for a in (shared.suffix, shared.suffix_mask, keys))
      fresh = sharding.spread((suffix, mask & (chosen < n)[..., None], key), params)
      parts.append(_enter(config, dtype, params, prefix, *fresh))
      place = np.concatenate([place, chosen], 1)
      queued, waiting = queued + enter, waiting - enter
    live = np.concatenate([~done, place[:, done.shape[1] :] < n], 1)
    size = _halved(done.shape[1], int(live.sum(1).max()))
    order = np.argsort(~live, axis=1, kind="stable")[:, :size]
    place, live = np.take_along_axis(place, order, 1), np.take_along_axis(live, order, 1)
    room = max(progress.new_k.shape[3], used + FIRST_ROOM // 2)
    width = next((width for width in widths if width >= room), widths[-1])
    progress, rows = _arrange(width, parts, order, np.int32(used))
    progress = _go_on(*static, params, progress, rows, prefix, *draw, until(live), pause(used))


def _ended(watch: Watch, found: Sequence[np.ndarray], real: np.ndarray) -> np.ndarray:
  """Which rows the watcher ends, bool [P, n + 1]; padding has always ended."""
  ids, _, lengths = found
  told = watch([[ids[p, i, : lengths[p, i]] for i in range(count)] for p, count in enumerate(real.sum(1))])
  ended = np.ones(lengths.shape, bool)
  ended[:, : told.shape[1]] = told
  return ended


def _widths(most: int) -> list[int]:
  """Room for new tokens in the rounds: [300] becomes 128, 256, 300."""
  found = [FIRST_ROOM]
  while found[-1] < most:
    found.append(2 * found[-1])
  return [*found[:-1], most]


def _halved(rows: int, live: int) -> int:
  """`rows` halved as long as `live` rows still fit, so that few shapes are met."""
  while rows > 1 and -(-rows // 2) >= live:
    rows = -(-rows // 2)
  return rows


def _completion(ids, logps, length, stop) -> Completion:
  ids, logps = ids[:length].copy(), logps[:length].copy()
  return Completion(ids, logps, Finish.STOP if length and ids[-1] in stop else Finish.LENGTH)


class _Progress(NamedTuple):
  """What changes while tokens are sampled; W is the room for new tokens.

  Attributes:
    t: columns of new keys that are filled.
    done: bool [P, n].
    states: float32 [P, n, D], from which the next token is drawn.
    ids, logps: [P, n, W].
    lengths: int32 [P, n], tokens sampled so far.
    new_k, new_v: [L, P, n, W, K, H]; a row's own end at column t.
  """

  t: jax.Array
  done: jax.Array
  states: jax.Array
  ids: jax.Array
  logps: jax.Array
  lengths: jax.Array
  new_k: jax.Array
  new_v: jax.Array


class _Rows(NamedTuple):
  """What was read of each row before its first token.

  Attributes:
    k, v: of the prompt, [L, P, n, Ts, K, H].
    mask: bool [P, n, Ts].
    keys: uint32 [P, n, 2], from which the row draws.
    start: int32 [P, n], the column of the row's first new token.
  """

  k: jax.Array
  v: jax.Array
  mask: jax.Array
  keys: jax.Array
  start: jax.Array


class _Prefix(NamedTuple):
  """What was read of the prefixes: k, v [L, P, Tp, K, H] and mask bool [P, Tp]."""

  k: jax.Array
  v: jax.Array
  mask: jax.Array


@functools.partial(jax.jit, static_argnums=range(7))
def _begin(
  config: DecoderConfig,
  stop,
  top_k,
  nucleus,
  width,
  more,
  dtype,
  params,
  shared: Shared,
  keys,
  temperature,
  top_p,
  limit,
  until,
  pause,
):
  """Reads prefixes and the first rows, and samples up to `width` tokens; of keys it returns what `more` needs."""
  states, caches = forward(config, params, shared, dtype=jnp.dtype(dtype), keep_cache=True)
  assert caches is not None, "asked for"
  prefix = _Prefix(caches[0], caches[1], shared.prefix_mask)
  progress, rows = _unsampled(config, width, states, caches[2:], shared.suffix_mask, keys)
  progress = _sample(
    config, stop, top_k, nucleus, params, progress, rows, prefix, temperature, top_p, limit, until, pause
  )
  nothing = jnp.zeros(())
  if more:
    return progress, rows, prefix
  return progress._replace(new_k=nothing, new_v=nothing, states=nothing), nothing, nothing


@functools.partial(jax.jit, static_argnums=(0, 1))
def _enter(config: DecoderConfig, dtype, params, prefix: _Prefix, suffix, mask, keys) -> tuple[_Progress, _Rows]:
  """Reads the prompts `suffix` of further rows [P, m], after prefixes that were read before."""
  batch = Shared(prefix.mask, prefix.mask, suffix, mask)  # ids of prefixes are not looked at
  states, caches = forward(config, params, batch, dtype=jnp.dtype(dtype), keep_cache=True, known=(prefix.k, prefix.v))
  return _unsampled(config, 0, states, caches, mask, keys)


def _unsampled(config: DecoderConfig, width, states, caches, mask, keys) -> tuple[_Progress, _Rows]:
  """Rows whose prompts were read, with room for `width` new tokens."""
  ids, lengths = jnp.zeros((*mask.shape[:2], width), jnp.int32), jnp.zeros(mask.shape[:2], jnp.int32)
  room = jnp.zeros((config.layers, *ids.shape, config.kv_heads, config.head_size), caches[0].dtype)
  done = ~jnp.any(mask, axis=-1)
  progress = _Progress(jnp.int32(0), done, states[:, :, -1], ids, ids.astype(jnp.float32), lengths, room, room)
  return progress, _Rows(caches[0], caches[1], mask, keys, lengths)


@functools.partial(jax.jit, static_argnums=0)
def _arrange(width, parts: list[tuple[_Progress, _Rows]], order, used) -> tuple[_Progress, _Rows]:
  """One batch of the rows `order` [P, n] of several, with room for `width` new tokens of which `used` are filled."""

  def pick(get, axis=1, wide=None):
    each = [get(*part) for part in parts]
    if wide is not None:
      each = [jnp.pad(a, [(0, width - a.shape[wide] if i == wide else 0) for i in range(a.ndim)]) for a in each]
    whole = jnp.concatenate(each, axis)
    shape = [1] * whole.ndim
    shape[axis - 1], shape[axis] = order.shape
    return jnp.take_along_axis(whole, order.reshape(shape), axis)

  lengths, old = pick(lambda p, _: p.lengths), pick(lambda _, r: r.start)
  start = used - lengths
  column = jnp.clip(jnp.arange(width) + (old - start)[..., None], 0, width - 1)[None, ..., None, None]
  progress = _Progress(
    used,
    pick(lambda p, _: p.done),
    pick(lambda p, _: p.states),
    pick(lambda p, _: p.ids, wide=2),
    pick(lambda p, _: p.logps, wide=2),
    lengths,
    jnp.take_along_axis(pick(lambda p, _: p.new_k, 2, 3), column, 3),
    jnp.take_along_axis(pick(lambda p, _: p.new_v, 2, 3), column, 3),
  )
  rows = _Rows(
    pick(lambda _, r: r.k, 2),
    pick(lambda _, r: r.v, 2),
    pick(lambda _, r: r.mask),
    pick(lambda _, r: r.keys),
    start,
  )
  return progress, rows


def _sample(
  config: DecoderConfig,
  stop,
  top_k,
  nucleus,
  params,
  progress: _Progress,
  rows: _Rows,
  prefix: _Prefix,
  temperature,
  top_p,
  limit,
  until,
  pause,
) -> _Progress:
  """Samples until `until` rows or fewer go on, or `pause` columns or the room are full.

  A row goes on to a stop token or to `limit`.
  """
  width, dtype = progress.ids.shape[-1], progress.new_k.dtype
  first = prefix.mask.sum(-1)[:, None] + rows.mask.sum(-1)
  stop_ids, column = jnp.array(stop, jnp.int32), jnp.arange(width)
  to_prefix, to_prompt = prefix.mask[:, None, None, :], rows.mask[:, :, None, :]

  def go_on(now: _Progress):
    return (now.t < jnp.minimum(width, pause)) & (jnp.sum(~now.done) > until)

  def one(now: _Progress):
    t, done, number = now.t, now.done, now.lengths
    token, logp = _draw(params, now.states, rows.keys, number, temperature, top_k, top_p if nucleus else None)
    here = (column == number[..., None]) & ~done[..., None]
    ids, logps = jnp.where(here, token[..., None], now.ids), jnp.where(here, logp[..., None], now.logps)
    lengths = number + ~done
    done = done | jnp.any(token[..., None] == stop_ids, axis=-1) | (lengths >= limit)
    rope = rotary((first + number)[..., None], config.head_size, config.rope_theta)
    to_new = ((column >= rows.start[..., None]) & (column < t))[:, :, None, :]

    def layer(x, xs):
      weights, prefix_k, prefix_v, prompt_k, prompt_v, past_k, past_v = xs
      net = block(config, weights)
      q, k, v = net.qkv(x, rope)
      own = [(prompt_k, prompt_v, to_prompt), (past_k, past_v, to_new), (k, v, jnp.ones((1, 1, 1, 1), bool))]
      return net.finish(x, attend(q, [(prefix_k, prefix_v, to_prefix)], own)), (k, v)

    x = embed(params, token, dtype)[:, :, None]
    layers = (params["layers"], prefix.k, prefix.v, rows.k, rows.v, now.new_k, now.new_v)
    x, (k, v) = jax.lax.scan(layer, x, layers, unroll=unroll(config))
    new_k, new_v = (jax.lax.dynamic_update_slice_in_dim(a, b, t, 3) for a, b in ((now.new_k, k), (now.new_v, v)))
    states = rms_norm(x[:, :, 0].astype(jnp.float32), params["norm"], config.norm_eps)
    return _Progress(t + 1, done, states, ids, logps, lengths, new_k, new_v)

  return jax.lax.while_loop(go_on, one, progress)


_go_on = jax.jit(_sample, static_argnums=range(4), donate_argnames="progress")


def _draw(params, states, keys, number, temperature, top_k, top_p):
  """The token `number` of each row [P, n] and its log-probability; temperature 0 takes the likeliest."""
  greedy = temperature <= 0
  z = logits(params, states, jnp.where(greedy, 1.0, temperature))
  choice = _narrow(z, top_k, top_p)

  def uniform(key, number):
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), number))

  weights = jnp.exp(choice - jnp.max(z, axis=-1, keepdims=True))
  drawn = _invert(weights, jax.vmap(jax.vmap(uniform))(keys, number))
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
