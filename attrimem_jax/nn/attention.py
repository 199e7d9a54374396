"""Attention over keys that are shared and keys that are a row's own, without ever copying the shared ones.

A row's queries see up to two kinds of keys: a prefix that n suffixes share, and keys of the row itself. The softmax
runs over all of them at once; only its maximum and its sum cross between the parts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SCORES = 2**28  # most scores that are computed together, over all devices
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


def attend(q, shared, own) -> jax.Array:
  """Grouped-query attention of suffix queries over shared and own keys.

  A mask is bool, or float: then it is the factor of a key's weight before the weights are made to sum to 1, and 0 hides
  a key as False does (its gradient there is 0). Where all scores together would not fit `SCORES`, they are computed for
  some queries after the other, and again in the backward pass, so that memory grows with their number alone.

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
  rows = [(k, v, mask.rows(start, T) if isinstance(mask, Causal) else mask) for k, v, mask in own]
  parts = [_part(q, k, v, mask, "pkntg", "pskh") for k, v, mask in shared]
  parts += [_part(q, k, v, mask, "pnktg", "pnskh") for k, v, mask in rows]
  top = jax.lax.stop_gradient(jnp.max(jnp.stack([part[0] for part in parts]), axis=0))
  weighted, total = zip(*(accumulate(top) for _, accumulate in parts), strict=True)
  out = sum(weighted) / jnp.maximum(sum(total), 1e-30)[..., None]
  return out.reshape(P, n, T, N, H).astype(q.dtype)


def _part(q, k, v, mask, rows, keys):
  """One part's row maxima [P, n, T, K, g], and a function from the joint maxima to (sum of p·v, sum of p).

  `rows` is the order in which the matrix product leaves the axes of the queries, so that nothing large is transposed.
  """
  scores = jnp.einsum(f"pntkgh,{keys}->{rows}s", q, k, preferred_element_type=jnp.float32)
  mask = jnp.broadcast_to(mask, (*q.shape[:3], k.shape[-3]))
  mask = jnp.expand_dims(mask, (1, 4) if rows == "pkntg" else (2, 4))
  seen = mask != 0
  scores = jnp.where(seen, scores, _MASKED)

  def accumulate(top):
    p = jnp.where(seen, jnp.exp(scores - jnp.einsum(f"pntkg->{rows}", top)[..., None]), 0.0)
    if mask.dtype != bool:
      p = p * mask
    values = jnp.einsum(f"{rows}s,{keys}->{rows}h", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return jnp.einsum(f"{rows}h->pntkgh", values), jnp.einsum(f"{rows}->pntkg", p.sum(-1))

  return jnp.einsum(f"{rows}->pntkg", scores.max(-1)), accumulate
