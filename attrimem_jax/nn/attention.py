"""Attention over keys that are shared and keys that are a row's own, without ever copying the shared ones.

A row's queries see up to two kinds of keys: a prefix that n suffixes share, and keys of the row itself. The softmax
runs over all of them at once; only its maximum and its sum cross between the parts.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

SCORES = 2**28  # most scores that are computed together, over all devices
_FUSED: Literal["cudnn", "xla"] = "cudnn"
_MASKED = -1e30  # finite, so that a row that sees nothing gives zeros and not NaN


def rotary(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """Cosine and sine, float32 [..., H/2], of the rotary embedding at integer `positions` [...]."""
  frequency = theta ** -(jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
  angle = positions[..., None].astype(jnp.float32) * frequency
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Turns x [..., N, H] by `rope` [..., H/2]; the halves of a head are the pairs, as in transformers' Llama."""
  cos, sin = (a[..., None, :] for a in rope)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Causal(NamedTuple):
  """The mask of queries over their own sequence: a query sees itself, and before itself what `keep` leaves.

  Attributes:
    real: bool, broadcastable to [P, n, 1, T]; padding is False and nothing sees it.
    keep: like `real`, bool or float as a mask; None keeps all.
  """

  real: jax.Array
  keep: jax.Array | None = None

  def rows(self, start: int | jax.Array, count: int) -> jax.Array:
    """The mask [P, n, count, T] of the queries from `start` on."""
    query, key = start + jnp.arange(count)[:, None], jnp.arange(self.real.shape[-1])
    seen = (key <= query) & self.real
    if self.keep is None:
      return seen
    keep = jnp.where(key == query, jnp.ones_like(self.keep), self.keep)
    return seen & keep if keep.dtype == bool else jnp.where(seen, keep, 0.0)


def causal(q, k, v, real) -> jax.Array:
  """Attention of sequences over themselves, padded on the right: the reading of a prefix.

  On a GPU in half precision cuDNN's fused kernel computes it, forward and backward; there the results of padding have
  no meaning. `attend` leaves that kernel alone: it returns its log-sum-exp in half precision, too coarse to merge by.

  Args:
    q: [P, T, N, H].
    k, v: [P, T, K, H].
    real: bool [P, T].

  Returns:
    [P, T, N, H] in q's dtype.
  """
  if _is_fused(q):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=_FUSED)
  return attend(q[:, None], [], [(k[:, None], v[:, None], Causal(real[:, None, None, :]))])[:, 0]


def _is_fused(q) -> bool:
  if jax.default_backend() != "gpu" or q.dtype.itemsize != 2 or q.shape[-1] > 128 or q.shape[-1] % 8:
    return False
  return float(jax.devices()[0].compute_capability) >= 8


def attend(q, shared, own) -> jax.Array:
  """Grouped-query attention of suffix queries over shared and own keys.

  A mask is bool, or float: then it is the factor of a key's weight before the weights are made to sum to 1, and 0 hides
  a key as False does (its gradient there is 0). Under bool masks the weights are computed again in the backward pass
  instead of kept, and where all scores together would not fit `SCORES`, they are computed for some queries after the
  other, so that memory grows with tokens and not with their square.

  Args:
    q: [P, n, T, N, H].
    shared: list of (k [P, S, K, H], v like k, mask broadcastable to [P, n, 1, S]).
    own: list of (k [P, n, S, K, H], v like k, mask broadcastable to [P, n, 1, S], or Causal).

  Returns:
    [P, n, T, N, H] in q's dtype; a query that sees no key gets zeros.
  """
  P, n, T, N, _ = q.shape
  keys = sum(k.shape[-3] for k, _, _ in shared + own)
  count = max(1, SCORES // (P * n * N * keys))
  if count >= T:
    return _attend(q, shared, own, 0)
  blocks = -(-T // count)
  count = -(-T // blocks)  # as even as can be
  padded = jnp.pad(q, ((0, 0), (0, 0), (0, blocks * count - T), (0, 0), (0, 0)))
  some = jnp.moveaxis(padded.reshape(P, n, blocks, count, *q.shape[3:]), 2, 0)

  @jax.checkpoint
  def one(block):
    return _attend(block[0], shared, own, block[1])

  out = jax.lax.map(one, (some, jnp.arange(blocks) * count))
  return jnp.moveaxis(out, 0, 2).reshape(P, n, blocks * count, *q.shape[3:])[:, :, :T]


def _attend(q, shared, own, start) -> jax.Array:
  """Of the queries from `start` on."""
  P, n, T, N, H = q.shape
  kv_heads = (shared + own)[0][0].shape[-2]
  q = q.reshape(P, n, T, kv_heads, N // kv_heads, H) * H**-0.5
  parts = shared + [(k, v, mask.rows(start, T) if isinstance(mask, Causal) else mask) for k, v, mask in own]
  keys, values, masks = (list(each) for each in zip(*parts, strict=True))
  gated = any(mask.dtype != bool for mask in masks)
  out = _softmax(q, keys, values, masks)[0] if gated else _recomputed(q, keys, values, masks)
  return out.reshape(P, n, T, N, H).astype(q.dtype)


@jax.custom_vjp
def _recomputed(q, keys, values, masks):
  """`_softmax` under bool masks, whose weights are computed again in the backward pass instead of kept."""
  return _softmax(q, keys, values, masks)[0]


def _softmax(q, keys, values, masks) -> tuple[jax.Array, jax.Array]:
  """The attention of scaled queries q, float32 [P, n, T, K, g, H] as they, and its log-sum-exp [P, n, T, K, g]."""
  parts = [_scores(q, k, mask) for k, mask in zip(keys, masks, strict=True)]
  maxima = [jnp.einsum(f"{_rows(k)}->pntkg", scores.max(-1)) for k, (scores, _) in zip(keys, parts, strict=True)]
  top = jax.lax.stop_gradient(jnp.max(jnp.stack(maxima), axis=0))
  weighted, total = [], []
  for k, v, (scores, mask) in zip(keys, values, parts, strict=True):
    p = _weights(scores, mask, jnp.einsum(f"pntkg->{_rows(k)}", top))
    p = p if mask.dtype == bool else p * mask
    each = jnp.einsum(f"{_rows(k)}s,{_keys(k)}->{_rows(k)}h", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    weighted.append(jnp.einsum(f"{_rows(k)}h->pntkgh", each))
    total.append(jnp.einsum(f"{_rows(k)}->pntkg", p.sum(-1)))
  whole = jnp.maximum(sum(total), 1e-30)
  return sum(weighted) / whole[..., None], top + jnp.log(whole)


def _forward(q, keys, values, masks):
  out, normaliser = _softmax(q, keys, values, masks)
  return out, (q, keys, values, masks, out, normaliser)


def _backward(kept, slope):
  """The derivative of a softmax p·v by its scores is p (slope·v - slope·out)."""
  q, keys, values, masks, out, normaliser = kept
  common = (slope * out).sum(-1)
  by_q, by_keys, by_values = jnp.zeros(q.shape, jnp.float32), [], []
  for k, v, mask in zip(keys, values, masks, strict=True):
    rows = _rows(k)
    queries, slopes = (jnp.einsum(f"pntkgh->{rows}h", a).astype(q.dtype) for a in (q, slope))
    total, shift = (jnp.einsum(f"pntkg->{rows}", a) for a in (normaliser, common))
    p = _weights(*_scores(q, k, mask), total)
    by_p = jnp.einsum(f"{rows}h,{_keys(k)}->{rows}s", slopes, v, preferred_element_type=jnp.float32)
    by_scores = (p * (by_p - shift[..., None])).astype(q.dtype)
    by_row = jnp.einsum(f"{rows}s,{_keys(k)}->{rows}h", by_scores, k, preferred_element_type=jnp.float32)
    by_q += jnp.einsum(f"{rows}h->pntkgh", by_row)
    by_keys.append(_by_key(queries, by_scores, k))
    by_values.append(_by_key(slopes, p.astype(v.dtype), v))
  return by_q.astype(q.dtype), by_keys, by_values, [None] * len(masks)


_recomputed.defvjp(_forward, _backward)


def _rows(k) -> str:
  """The order in which products with a part's keys leave the axes of queries, so that nothing large is transposed."""
  return "pkntg" if k.ndim == 4 else "pnktg"


def _keys(k) -> str:
  """The axes of a part's keys and values: shared by all n, or of each."""
  return "pskh" if k.ndim == 4 else "pnskh"


def _scores(q, k, mask) -> tuple[jax.Array, jax.Array]:
  """A part's scores, float32, and its mask with their axes."""
  scores = jnp.einsum(f"pntkgh,{_keys(k)}->{_rows(k)}s", q, k, preferred_element_type=jnp.float32)
  mask = jnp.broadcast_to(mask, (*q.shape[:3], k.shape[-3]))
  mask = jnp.expand_dims(mask, (1, 4) if k.ndim == 4 else (2, 4))
  return jnp.where(mask != 0, scores, _MASKED), mask


def _weights(scores, mask, shift) -> jax.Array:
  """exp(score - shift), and 0 where nothing is seen."""
  return jnp.where(mask != 0, jnp.exp(scores - shift[..., None]), 0.0)


def _by_key(small, large, like) -> jax.Array:
  """Sums [..., h] times [..., s] over a part's rows, shaped `like` its keys.

  The small operand stands left: the other way round XLA's CPU backend transposes the large one first.
  """
  over = tuple(range(2 if like.ndim == 4 else 3, 5))
  batch = tuple(range(over[0]))
  found = jax.lax.dot_general(small, large, ((over, over), (batch, batch)), preferred_element_type=jnp.float32)
  return jnp.einsum("pkhs->pskh" if like.ndim == 4 else "pnkhs->pnskh", found).astype(like.dtype)
