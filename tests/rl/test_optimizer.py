"""Float32 or nothing, a schedule that starts above zero, and updates that cannot do harm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attrimem_jax.rl.optimizer import OptimizerSettings, apply_gradients, init_state, make_optimizer, make_schedule


def test_bfloat16_weights_are_refused_by_name():
  params = {"embed": jnp.zeros(2), "layers": {"q": jnp.zeros(2, jnp.bfloat16)}}
  with pytest.raises(ValueError, match=r"\['layers'\]\['q'\] is bfloat16"):
    init_state(make_optimizer(OptimizerSettings(1e-3)), params)


def test_moments_are_float32():
  state = init_state(make_optimizer(OptimizerSettings(1e-3)), {"w": jnp.zeros(3)})
  floats = [leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
  assert floats == [jnp.float32] * 2


def test_the_state_can_be_traced_without_computing_it():
  optimizer = make_optimizer(OptimizerSettings(1e-3))
  params = {"w": jnp.zeros((2, 3))}
  abstract = jax.eval_shape(lambda: init_state(optimizer, params))
  assert jax.tree.structure(abstract) == jax.tree.structure(init_state(optimizer, params))
  traced = jax.eval_shape(lambda params: init_state(optimizer, params), params)
  assert jax.tree.structure(traced) == jax.tree.structure(abstract)


@pytest.mark.parametrize(("dtype", "moves"), [(jnp.float32, True), (jnp.bfloat16, False)])
def test_why_float32(dtype, moves):
  """200 steps of 1e-6 on a weight of 0.02: float32 moves by 2e-4, bfloat16 not at all."""
  weight = jnp.asarray(0.02, dtype)
  for _ in range(200):
    weight = (weight + jnp.asarray(1e-6, dtype)).astype(dtype)
  assert (float(weight) != float(jnp.asarray(0.02, dtype))) == moves


def test_schedule_by_hand():
  constant = make_schedule(OptimizerSettings(4.0, warmup_steps=3))
  np.testing.assert_allclose([constant(i) for i in range(5)], [1, 2, 3, 4, 4])
  cosine = make_schedule(OptimizerSettings(1.0, schedule="cosine", total_steps=4, final_fraction=0.5))
  np.testing.assert_allclose([cosine(i) for i in (0, 2, 4, 9)], [1, 0.75, 0.5, 0.5])


def test_first_adam_step_is_the_learning_rate():
  optimizer = make_optimizer(OptimizerSettings(1e-2, eps=1e-12))
  state, metrics = apply_gradients(optimizer, init_state(optimizer, jnp.zeros(2)), jnp.array([3.0, -4.0]), jnp.ones(()))
  np.testing.assert_allclose(state.params, [-1e-2, 1e-2], rtol=1e-5)
  np.testing.assert_allclose([metrics["grad_norm"], metrics["update_norm"]], [5, 1e-2 * 2**0.5], rtol=1e-5)
  assert state.step == 1 and metrics["skipped"] == 0  # noqa: PT018


def test_decay_spares_norms_and_biases_however_many_axes_they_have():
  params = {
    "layers": {"q": jnp.ones((2, 3)), "q_norm": jnp.ones((2, 3)), "q_bias": jnp.ones((2, 3))},
    "norm": jnp.ones(3),
  }
  optimizer = make_optimizer(OptimizerSettings(1e-1, weight_decay=0.5))
  zeros = jax.tree.map(jnp.zeros_like, params)
  state, _ = apply_gradients(optimizer, init_state(optimizer, params), zeros, jnp.ones(()))
  np.testing.assert_allclose(state.params["layers"]["q"], 0.95)
  for spared in (state.params["layers"]["q_norm"], state.params["layers"]["q_bias"], state.params["norm"]):
    np.testing.assert_array_equal(spared, 1)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted(bad):
  optimizer = make_optimizer(OptimizerSettings(1e-2))
  start = init_state(optimizer, jnp.ones(2))
  state, metrics = apply_gradients(optimizer, start, jnp.array([bad, 1.0]), jnp.ones(()))
  assert metrics["skipped"] == 1
  np.testing.assert_array_equal(state.params, 1)
  for leaf, before in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(start.opt_state), strict=True):
    np.testing.assert_array_equal(leaf, before)


def test_rounding_that_swallows_the_update_shows_as_zero():
  optimizer = make_optimizer(OptimizerSettings(1e-9))
  _, metrics = apply_gradients(optimizer, init_state(optimizer, jnp.ones(2)), jnp.ones(2), jnp.ones(()))
  assert metrics["update_norm"] == 0


def test_all_bad_settings_are_named_at_once():
  with pytest.raises(ValueError) as caught:
    make_optimizer(OptimizerSettings(-1.0, schedule="linear", clip_norm=-2))
  for part in ("learning_rate: -1.0", "schedule: 'linear'", "clip_norm: -2"):
    assert part in str(caught.value)


def test_muon_moves_each_matrix_of_each_layer_by_itself():
  """Oracle: optax's Muon on plain two-dimensional matrices; everything else moves by Adam (with Nesterov momentum)."""
  rng = np.random.default_rng(0)
  shapes = {"q": (2, 6, 2, 4), "o": (2, 2, 4, 6), "gate": (2, 6, 10), "down": (2, 10, 6), "q_norm": (2, 4)}
  params = {"embed": jnp.zeros((7, 6)), "layers": {name: jnp.zeros(shape) for name, shape in shapes.items()}}
  grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
  optimizer = make_optimizer(OptimizerSettings(1e-2, name="muon", clip_norm=0.0))
  state, _ = apply_gradients(optimizer, init_state(optimizer, params), grads, jnp.ones(()))
  adam = optax.nadamw(1e-2, eps=1e-8, weight_decay=0.0)
  expected, _ = apply_gradients(adam, init_state(adam, params), grads, jnp.ones(()))
  plain = optax.contrib.muon(1e-2, consistent_rms=0.2)
  flat = {"q": (6, 8), "o": (8, 6), "gate": (6, 10), "down": (10, 6)}
  for name, got in state.params["layers"].items():
    for layer in range(2):
      want = expected.params["layers"][name][layer]
      if name in flat:
        gradient = grads["layers"][name][layer].reshape(flat[name])
        want = plain.update(gradient, plain.init(gradient), gradient)[0].reshape(want.shape)
      np.testing.assert_allclose(got[layer], want, rtol=1e-4, atol=1e-7)
  np.testing.assert_allclose(state.params["embed"], expected.params["embed"], rtol=1e-4)
