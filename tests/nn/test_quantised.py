"""Rounded matrices: how far they are from the whole ones, and that a network reads them as their values."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.nn import decoder, sharding
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.lora import TARGETS
from attrimem_jax.nn.quantised import quantise
from attrimem_jax.rollout.sampling import Sampling, complete
from tests.nn import oracle

pytest.importorskip("qwix")
CONFIG = DecoderConfig(53, 16, 2, 4, 2, 6, 24, rope_theta=1e4, max_positions=128)
BATCH = pack([[5, 9, 0, 31]], [[([3, 8], [1, 4, 4]), ([11], [7])]], step=8)


@pytest.fixture(scope="module")
def params():
  return oracle.draw(CONFIG, 3)


def plain(w, inputs, kind):
  """Round to nearest, one scale for each output of each layer, in float64; the largest entry is halfway: NaN."""
  w, most = np.asarray(w, np.float64), {"int8": 127.5, "int4": 7.5}[kind]
  largest = np.abs(w).max(tuple(range(1, 1 + inputs)), keepdims=True)
  return np.where(np.abs(w) == largest, np.nan, np.round(w / largest * most) * largest / most)


def values(leaf):
  return np.asarray(leaf.qvalue, np.float32) * np.asarray(leaf.scale)


@pytest.mark.parametrize(("kind", "share"), [("int8", 4), ("int4", 8)])
def test_a_network_reads_the_rounded_values(params, kind, share):
  found = quantise(params, kind)
  for name, inputs in TARGETS.items():
    leaf, whole = found["layers"][name], np.asarray(params["layers"][name])
    expected = plain(whole, inputs, kind)
    np.testing.assert_allclose(np.where(np.isnan(expected), np.nan, values(leaf)), expected, atol=1e-6)
    assert np.all(np.abs(values(leaf) - whole) <= leaf.scale * 0.501)
    assert jnp.iinfo(leaf.qvalue.dtype).bits * share == 32
    assert leaf.qvalue.shape == whole.shape
  dequantised = found | {"layers": {n: values(a) if n in TARGETS else a for n, a in found["layers"].items()}}
  run = jax.jit(lambda p: decoder.hidden(CONFIG, p, BATCH))
  np.testing.assert_allclose(run(found), run(dequantised), atol=2e-5)
  gap = np.abs(np.asarray(run(found) - run(params)))[BATCH.suffix_mask].max()
  assert 1e-4 < gap < {"int8": 0.2, "int4": 3.0}[kind], "it is rounded, and not by much"


def test_rounded_weights_are_placed_and_sampled_from(params):
  placed = sharding.place(quantise(params, "int8"), sharding.make_mesh())
  tokenizer = types.SimpleNamespace(stop_ids=())
  model = types.SimpleNamespace(name="tiny", config=CONFIG, params=placed, tokenizer=tokenizer)
  keys = np.zeros((1, 1, 2), np.uint32)
  ((done,),) = complete(model, [[5, 9]], [[[3]]], keys, Sampling(4, 0.0), step=8)
  dequantised = {n: values(a) if n in TARGETS else a for n, a in placed["layers"].items()}
  z = oracle.logits(CONFIG, placed | {"layers": dequantised}, [5, 9, 3, *done.ids])[2:-1]
  np.testing.assert_array_equal(done.ids, z.argmax(-1))
