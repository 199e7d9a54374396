"""Updates of low-rank factors: they alone move and have moments, and the frozen weights are the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attrimem_jax.nn import lora as low_rank
from attrimem_jax.nn.lora import TARGETS, Lora
from attrimem_jax.rl.loss import LossSettings
from attrimem_jax.rl.optimizer import OptimizerSettings, init_state, make_optimizer
from attrimem_jax.rl.sft import SftBatch, make_sft_update
from attrimem_jax.rl.update import Batch, check_first_step, make_update
from tests.nn import oracle
from tests.rl import bigram

CONFIG = oracle.DecoderConfig(bigram.VOCAB, 16, 2, 4, 2, 4, 24)
LORA = Lora(2, 3.0, tuple(TARGETS))
ADAM = make_optimizer(OptimizerSettings(learning_rate=1e-2))
SHARED = bigram.sequences(2, 3)
MASK = SHARED.suffix_mask[..., -bigram.COUNT :]


@pytest.fixture
def frozen():
  return jax.tree.map(jnp.asarray, oracle.draw(CONFIG))


def _drawn():
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32), LORA.abstract(CONFIG))


def _batch():
  rng = np.random.default_rng(1)
  return Batch(SHARED, MASK, jnp.asarray(rng.normal(size=MASK.shape), jnp.float32))


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_a_policy_update_moves_the_factors_alone(frozen, kl):
  update = make_update(CONFIG, ADAM, LossSettings(kl_coefficient=kl), lora=LORA)
  before = jax.device_get(frozen)
  start = LORA.init(CONFIG, 0)
  state = init_state(ADAM, jax.tree.map(jnp.array, start))
  shapes = {leaf.shape for leaf in jax.tree.leaves(start)} | {()}
  assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)} == shapes, "moments of factors alone"
  state, metrics = update(state, frozen, _batch())
  assert check_first_step(metrics)
  assert metrics.get("kl", 0.0) == 0.0, "factors that change nothing leave the policy at the reference, to the last bit"
  moved = {name: float(jnp.abs(leaf - start["layers"][name]).max()) for name, leaf in state.params["layers"].items()}
  assert all((moved[name] > 1e-4) == name.endswith("_b") for name in moved), "where B is zero, A has no gradient"
  state, metrics = update(state, frozen, _batch())
  assert all(jnp.abs(leaf - start["layers"][name]).max() > 1e-4 for name, leaf in state.params["layers"].items())
  assert kl == 0 or metrics["kl"] > 0
  assert update.compilations == 1
  jax.tree.map(np.testing.assert_array_equal, frozen, before)


def test_gradients_are_those_of_whole_weights_by_the_chain_rule(frozen):
  """With W = W0 + s A B, the loss has dA = s dW Bᵀ and dB = s Aᵀ dW: from the update of whole weights, in float64."""
  sgd = optax.trace(0.0)  # its state is the gradient
  settings = LossSettings(kl_coefficient=0.5)
  factors = _drawn()
  low, got = make_update(CONFIG, sgd, settings, lora=LORA)(
    init_state(sgd, jax.tree.map(jnp.array, factors)), frozen, _batch()
  )
  merged = jax.tree.map(jnp.asarray, LORA.merge(frozen, factors))
  dense, expected = make_update(CONFIG, sgd, settings)(init_state(sgd, merged), frozen, _batch())
  for name in ("loss", "kl", "entropy", "tokens"):
    np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
  for name, inputs in TARGETS.items():
    a, b = (np.asarray(factors["layers"][f"{name}_lora_{side}"], np.float64) for side in "ab")
    whole = np.asarray(dense.opt_state.trace["layers"][name], np.float64)
    whole = whole.reshape(CONFIG.layers, np.prod(whole.shape[1 : 1 + inputs]), -1)
    flat_a, flat_b = a.reshape(CONFIG.layers, -1, 2), b.reshape(CONFIG.layers, 2, -1)
    by_chain = {"a": 1.5 * whole @ flat_b.swapaxes(1, 2), "b": 1.5 * flat_a.swapaxes(1, 2) @ whole}
    for side, value in by_chain.items():
      found = np.asarray(low.opt_state.trace["layers"][f"{name}_lora_{side}"])
      assert np.abs(found).max() > 1e-4
      np.testing.assert_allclose(found.reshape(value.shape), value, atol=1e-5, err_msg=name + side)


def test_a_supervised_update_learns_with_the_factors_alone(frozen):
  update = make_sft_update(CONFIG, ADAM, lora=LORA)
  state, losses = init_state(ADAM, jax.tree.map(jnp.array, LORA.init(CONFIG, 0))), []
  before = jax.device_get(frozen)
  for _ in range(20):
    state, metrics = update(state, SftBatch(SHARED, MASK), frozen)
    losses.append(float(metrics["loss"]))
  assert losses[-1] < losses[0] - 0.3
  jax.tree.map(np.testing.assert_array_equal, frozen, before)
  with pytest.raises(AssertionError, match="frozen weights go with LoRA"):
    update(state, SftBatch(SHARED, MASK))


def test_without_lora_the_trained_weights_are_whole(frozen):
  assert low_rank.whole(None, None, frozen) is frozen
