"""Attention over shared and own keys against one plain softmax over all of them, in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn.attention import attend, rotary, rotate

P, n, T, N, K, H, SHARED, OWN = 2, 3, 4, 4, 2, 6, 5, 3


def draw(seed: int = 0):
  rng = np.random.default_rng(seed)
  q = rng.normal(size=(P, n, T, N, H))
  shared = rng.normal(size=(2, P, SHARED, K, H))
  own = rng.normal(size=(2, P, n, OWN, K, H))
  masks = rng.random((P, n, T, SHARED)) < 0.6, rng.random((P, n, T, OWN)) < 0.6
  masks[1][..., 0] = True
  return [a.astype(np.float32) for a in (q, shared, own)], masks


def plain(q, k, v, mask):
  """One row of queries [T, N, H] over keys [S, K, H] in float64; zeros where a query sees no key."""
  out = np.zeros(q.shape)
  for t, head in np.ndindex(q.shape[:2]):
    seen = np.flatnonzero(mask[t])
    if len(seen):
      keys, values = (a[seen, head * K // N].astype(np.float64) for a in (k, v))
      scores = keys @ q[t, head].astype(np.float64) / np.sqrt(H)
      p = np.exp(scores - scores.max())
      out[t, head] = p @ values / p.sum()
  return out


def attended(q, shared, own, masks):
  return attend(q, [(*shared, masks[0])], [(*own, masks[1])])


def test_one_softmax_over_shared_and_own_keys():
  (q, shared, own), masks = draw()
  out = jax.jit(attended)(q, shared, own, masks)
  for p, i in np.ndindex(P, n):
    k, v = (np.concatenate([a[p], b[p, i]]) for a, b in zip(shared, own, strict=True))
    expected = plain(q[p, i], k, v, np.concatenate([masks[0][p, i], masks[1][p, i]], -1))
    np.testing.assert_allclose(out[p, i], expected, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients():
  (q, shared, own), masks = draw(1)
  masks[0][0, 0, 1], masks[1][0, 0, 1] = False, False
  out = jax.jit(attended)(q, shared, own, masks)
  grads = jax.jit(jax.grad(lambda *args: jnp.sum(attended(*args, masks) ** 2), argnums=(0, 1, 2)))(q, shared, own)
  assert not np.any(out[0, 0, 1])
  assert all(np.isfinite(g).all() for g in grads)
  assert not np.any(grads[0][0, 0, 1])
  assert np.any(grads[0][0, 0, 0])


def test_huge_scores_do_not_overflow_and_the_largest_key_wins_across_parts():
  (q, shared, own), masks = draw(2)
  masks[0][:], masks[1][:] = True, True
  shared[0][:], own[0][:] = 0, 0
  q[:], own[0][:, :, 1] = 1e3, 1e3
  out = jax.jit(attended)(q, shared, own, masks)
  winner = np.repeat(own[1][:, :, None, 1], N // K, axis=-2)  # [P, n, 1, N, H]
  np.testing.assert_allclose(out, np.broadcast_to(winner, out.shape), rtol=1e-6)


def test_rotation_by_hand_and_by_distance():
  """One pair turns by its position in radians; scores depend on the distance of two positions alone."""
  cos, sin = rotary(jnp.array([0, 2]), 2, 1e4)
  turned = rotate(jnp.ones((2, 1, 2)), (cos, sin))[:, 0]
  np.testing.assert_allclose(turned, [[1, 1], [np.cos(2) - np.sin(2), np.cos(2) + np.sin(2)]], rtol=1e-6)
  q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 8)).astype(np.float32)

  def score(a: int, b: int) -> float:
    return float(jnp.sum(rotate(q, rotary(jnp.array([a]), 8, 1e4)) * rotate(k, rotary(jnp.array([b]), 8, 1e4))))

  np.testing.assert_allclose(score(7, 3), score(104, 100), rtol=1e-4)
  assert abs(score(7, 3) - score(3, 7)) > 1e-3
