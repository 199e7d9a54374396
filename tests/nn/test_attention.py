"""Attention over shared and own keys against one plain softmax over all of them, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.nn import attention
from attrimem_jax.nn.attention import Causal, attend, causal, rotary, rotate

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


def dense(q, shared, own, masks):
  """The same softmax over keys that are copied to every row, without a derivative of its own."""
  k, v = (
    jnp.repeat(jnp.concatenate([jnp.broadcast_to(a[:, None], (P, n, *a.shape[1:])), b], 2), N // K, axis=-2)
    for a, b in zip(shared, own, strict=True)
  )
  seen = jnp.concatenate(masks, -1)[:, :, :, None]
  scores = jnp.where(seen, jnp.einsum("pntNh,pnsNh->pntNs", q, k) / np.sqrt(H), -jnp.inf)
  top = jnp.maximum(scores.max(-1, keepdims=True), -1e9)  # of a query that sees nothing, any number
  p = jnp.exp(scores - top)
  return jnp.einsum("pntNs,pnsNh->pntNh", p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30), v)


def test_gradients_under_bool_masks_are_those_of_one_dense_softmax():
  (q, shared, own), masks = draw(5)
  masks[0][1, 2, 3], masks[1][1, 2, 3] = False, False  # this query sees nothing
  slope = np.random.default_rng(6).normal(size=q.shape)
  with jax.enable_x64(True):
    wide = [a.astype(np.float64) for a in (q, shared, own)]
    expected = jax.grad(lambda *a: jnp.sum(slope * dense(*a, masks)), argnums=(0, 1, 2))(*wide)
  found = jax.jit(jax.grad(lambda *a: jnp.sum(slope * attended(*a, masks)), argnums=(0, 1, 2)))(q, shared, own)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)
    assert np.abs(b).max() > 0.1


def test_training_keeps_no_scores_of_its_layers():
  """Memory of a gradient through a scan of eight layers of 256 queries: less than the scores of six would fill."""
  length, layers = 256, 8
  keep = Causal(jnp.ones((1, 1, 1, length), bool))

  def loss(x):
    x, _ = jax.lax.scan(lambda x, _: (x + attend(x, [], [(x, x, keep)]), None), x, length=layers)
    return jnp.sum(x**2)

  x = jax.ShapeDtypeStruct((1, 1, length, 4, 4), jnp.float32)
  memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 6 * 4 * length * length * 4


def test_a_prefix_read_by_the_fused_kernels_function_gives_the_same(monkeypatch):
  """The library's function in place of this one's; without a GPU it runs its plain form, float32, not cuDNN's."""
  rng, length, heads, size = np.random.default_rng(8), 9, 4, 8
  q, k, v = (rng.normal(size=(2, length, of, size)).astype(np.float32) for of in (heads, 2, 2))
  real = np.arange(length) < np.array([[9], [6]])
  slope = rng.normal(size=q.shape) * real[..., None, None]

  def run():
    def loss(q, k, v):
      out = causal(q, k, v, real)
      return jnp.sum(slope * out), out

    gradient, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return *gradient, np.where(real[..., None, None], out, 0)

  ours = run()
  called, fused = [], jax.nn.dot_product_attention
  monkeypatch.setattr(attention, "_is_fused", lambda q: True)
  monkeypatch.setattr(attention, "_FUSED", "xla")
  monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: called.append(k) or fused(*a, **k))
  for a, b in zip(ours, run(), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)
  assert called == [{"is_causal": True, "implementation": "xla"}]


@pytest.mark.parametrize("kind", [bool, np.float32])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_some_queries_after_the_other_change_neither_values_nor_gradients(count, kind, monkeypatch):
  """Causal over 4 own keys beside 5 shared ones; blocks of 1, of 2, and of 3 that become two of 2."""
  (q, shared, own), _ = draw(3)
  own = np.concatenate([own, own[:, :, :, :1]], axis=3)
  rng = np.random.default_rng(4)
  seen = (rng.random((P, n, 1, SHARED)) < 0.6).astype(kind)
  real, keep = (
    rng.random((P, n, 1, T)) < 0.8,
    (rng.random((P, n, 1, T)) * (rng.random((P, n, 1, T)) < 0.7)).astype(kind),
  )

  def loss(q, shared, own, seen, keep):
    return jnp.sum(jnp.sin(attend(q, [(*shared, seen)], [(*own, Causal(real, keep))])))

  arguments = (q, shared, own) if kind is bool else (q, shared, own, seen, keep)
  whole, blocked = [], []
  for limit, found in ((2**28, whole), (count * P * n * N * (SHARED + T), blocked)):
    monkeypatch.setattr(attention, "SCORES", limit)
    run = jax.jit(jax.value_and_grad(lambda *a: loss(*a, *(seen, keep)[len(a) - 3 :]), argnums=range(len(arguments))))
    found += jax.tree.leaves(run(*arguments))
  for a, b in zip(whole, blocked, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_causal_mask_by_hand():
  real = np.array([[[[True, True, False, True]]]])
  rows = Causal(real, np.array([[[[False, True, True, False]]]])).rows(1, 3)[0, 0].tolist()
  # Query 1 sees itself but not 0, which is hidden; 2 is padding; 3 is hidden from others but sees itself.
  assert rows == [[False, True, False, False], [False, True, False, False], [False, True, False, True]]
  np.testing.assert_array_equal(Causal(real).rows(0, 4)[0, 0], np.tril(np.ones((4, 4), bool)) & real[0, 0])


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
