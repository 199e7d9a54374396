"""Low-rank factors against the merged matrices in float64, finite differences and a count of what is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.lora import TARGETS, Lora
from attrimem_jax.rollout.sampling import Sampling, complete
from tests.nn import oracle

LORA = Lora(rank=3, alpha=6.0, targets=tuple(TARGETS))
COUNT = 3
LOGPROBS = jax.jit(decoder.token_logprobs, static_argnums=(0, 3), static_argnames="remat")
BATCH = pack(
  [[1, 2, 3, 4], [5, 6]],
  [[([7], [8, 9, 10]), ([11, 12], [13])], [([14], [15, 16]), ([17], [18, 19, 20])]],
  step=4,
  completion_width=COUNT,
)


def drawn(config, lora, seed=3):
  """Factors of plain size, B among them."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), lora.abstract(config))


def dense_merge(lora, params, factors):
  """W + (alpha / r) A B in float64, by einsum, from the shapes alone."""
  layers = {name: leaf.astype(np.float64) for name, leaf in params["layers"].items()}
  for name in lora.targets:
    a, b = (factors["layers"][f"{name}_lora_{side}"].astype(np.float64) for side in "ab")
    equation = {"o": "lnhr,lrd->lnhd", "q": "ldr,lrnh->ldnh", "k": "ldr,lrnh->ldnh", "v": "ldr,lrnh->ldnh"}
    layers[name] += lora.alpha / lora.rank * np.einsum(equation.get(name, "lir,lro->lio"), a, b)
  return params | {"layers": layers}


@pytest.mark.parametrize("config", [oracle.QWEN3, oracle.QWEN2, oracle.LLAMA], ids=lambda config: config.family)
def test_before_training_nothing_changes_by_a_single_bit(config):
  params = oracle.draw(config)
  joined = LORA.join(params, LORA.init(config, seed=0))
  np.testing.assert_array_equal(LOGPROBS(config, joined, BATCH, COUNT)[0], LOGPROBS(config, params, BATCH, COUNT)[0])
  jax.tree.map(np.testing.assert_array_equal, LORA.merge(params, LORA.init(config, seed=0)), params)
  assert joined["layers"]["q"] is params["layers"]["q"], "the frozen weights are not copied"


@pytest.mark.parametrize("config", [oracle.QWEN3, oracle.QWEN2, oracle.LLAMA], ids=lambda config: config.family)
@pytest.mark.parametrize("targets", [tuple(TARGETS), ("v",), ("o", "down")], ids="-".join)
def test_factors_compute_what_the_dense_sum_computes(config, targets):
  lora = Lora(2, 5.0, targets)
  params, factors = oracle.draw(config), drawn(config, lora)
  expected = dense_merge(lora, params, factors)
  merged = lora.merge(params, factors)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, expected)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  unmerged = LOGPROBS(config, lora.join(params, factors), BATCH, COUNT)[0]
  np.testing.assert_allclose(unmerged, LOGPROBS(config, merged, BATCH, COUNT)[0], atol=1e-5)
  exact = oracle.logprobs(config, expected, [1, 2, 3, 4, 7], [8, 9, 10])
  np.testing.assert_allclose(unmerged[0, 0], exact, atol=1e-5)
  assert np.abs(exact - oracle.logprobs(config, params, [1, 2, 3, 4, 7], [8, 9, 10])).max() > 1e-2


def test_gradients_are_those_of_finite_differences_and_none_is_of_a_frozen_weight():
  config = oracle.QWEN3
  params, factors = oracle.draw(config), drawn(config, LORA)

  def loss(factors):
    return LOGPROBS(config, LORA.join(params, factors), BATCH, COUNT, remat=True)[0].sum()

  gradients = jax.grad(loss)(factors)
  assert jax.tree.structure(gradients) == jax.tree.structure(factors)
  rng = np.random.default_rng(0)

  def exact(factors):  # of all four rows, in float64
    merged = dense_merge(LORA, params, factors)
    rows = (([1, 2, 3, 4, 7], [8, 9, 10]), ([1, 2, 3, 4, 11, 12], [13]), ([5, 6, 14], [15, 16]))
    return sum(oracle.logprobs(config, merged, *row).sum() for row in (*rows, ([5, 6, 17], [18, 19, 20])))

  for name, gradient in gradients["layers"].items():
    direction = rng.normal(size=gradient.shape)
    moved = (
      exact({"layers": factors["layers"] | {name: factors["layers"][name] + sign * 1e-5 * direction}})
      for sign in (1, -1)
    )
    slope = functools.reduce(float.__sub__, map(float, moved)) / 2e-5
    assert abs(slope) > 1e-3, name
    np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_backward_pass_leaves_out_the_gradients_of_whole_matrices():
  """Of the three products of a matrix (forward, inputs, weights) the last is gone, by the compiler's own count."""
  config = oracle.DecoderConfig(64, 64, 2, 4, 2, 16, 256)
  lora = Lora(1, 1.0, tuple(TARGETS))
  params, factors = decoder.abstract(config), lora.abstract(config)
  rows = (((1, 8), (1, 4, 64)), (jnp.int32, jnp.bool_))
  shared = decoder.Shared(*(jax.ShapeDtypeStruct(shape, kind) for shape in rows[0] for kind in rows[1]))

  def flops(loss, *arguments):
    return jax.jit(jax.grad(loss)).lower(*arguments, shared).compile().cost_analysis()["flops"]

  def loss(params, shared):
    return decoder.token_logprobs(config, params, shared, 16)[0].sum()

  matrices = sum(params["layers"][name].size for name in TARGETS)
  whole = flops(loss, params)
  low_rank = jax.jit(jax.grad(lambda f, p, s: loss(lora.join(p, f), s)))
  cheaper = whole - low_rank.lower(factors, params, shared).compile().cost_analysis()["flops"]
  assert cheaper == pytest.approx(2 * 4 * 64 * matrices, rel=0.15)


def test_sampling_reads_the_factors():
  """A greedy continuation of the joined parameters is that of the merged ones, and not of the frozen ones."""
  config = oracle.QWEN3
  params, factors = oracle.draw(config), drawn(config, LORA)

  class Model:
    name = "tiny"
    tokenizer = type("T", (), {"stop_ids": (52,)})()

    def __init__(self, params):
      self.config, self.params = config, params

  keys = np.zeros((1, 1, 2), np.uint32)
  texts = [
    complete(Model(p), [[1, 2, 3]], [[[4, 5]]], keys, Sampling(8, 0.0))[0][0]
    for p in (LORA.join(params, factors), LORA.merge(params, factors), params)
  ]
  np.testing.assert_array_equal(texts[0].ids, texts[1].ids)
  np.testing.assert_allclose(texts[0].logps, texts[1].logps, atol=1e-5)
  assert not np.array_equal(texts[0].ids, texts[2].ids)
