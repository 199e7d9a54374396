"""Checkpoints: bit-equal round trips, refusals by path, and what a crash leaves behind."""

import shutil
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attrimem_jax.io.checkpoints import Checkpoints, read_params
from attrimem_jax.rl.optimizer import OptimizerSettings, TrainState, apply_gradients, init_state, make_optimizer

OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=0.1, schedule="cosine", total_steps=10))


def make_state(steps=0, width=3):
  rng = np.random.default_rng(0)
  layers = {"q": rng.normal(size=(2, width, 2)), "q_norm": np.ones((2, 2))}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), {"embed": rng.normal(size=(4, width)), "layers": layers})
  state = init_state(OPTIMIZER, params)
  for _ in range(steps):
    state, _ = apply_gradients(OPTIMIZER, state, jax.tree.map(jnp.sin, state.params), jnp.int32(1))
  return state


def assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype, path
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A folder with step 3; tests that change it work on a copy."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  with Checkpoints(folder, keep=2) as checkpoints:
    checkpoints.save(3, make_state(3), {"config": {"seed": 1}, "words": "猫"})
  return folder


@pytest.mark.parametrize("abstract", [False, True])
def test_round_trip_is_bit_equal(saved, abstract):
  target = jax.eval_shape(make_state) if abstract else make_state()
  with Checkpoints(saved, keep=2) as checkpoints:
    assert checkpoints.latest() == 3
    restored = checkpoints.restore(3, target)
    assert_equal(restored, make_state(3))
    assert restored.step == 3
    assert checkpoints.meta(3) == {"config": {"seed": 1}, "words": "猫"}
    assert_equal(checkpoints.params(3), make_state(3).params)


def test_training_goes_on_as_if_it_had_not_stopped(saved):
  with Checkpoints(saved, keep=2) as checkpoints:
    state = checkpoints.restore(3, make_state())
  state, _ = apply_gradients(OPTIMIZER, state, jax.tree.map(jnp.sin, state.params), jnp.int32(1))
  assert_equal(state, make_state(4))


def test_other_jobs_read_parameters_alone(saved):
  abstract = jax.eval_shape(make_state).params
  assert_equal(read_params(saved, abstract), make_state(3).params)
  assert_equal(read_params(saved, abstract, step=3), make_state(3).params)
  with pytest.raises(ValueError, match="no complete checkpoint of step 4; there: 3"):
    read_params(saved, abstract, step=4)


def test_a_folder_without_checkpoints_is_refused_and_not_made(tmp_path):
  with pytest.raises(ValueError, match="does not exist; train first"):
    read_params(tmp_path / "nothing", {})
  assert not (tmp_path / "nothing").exists()
  with pytest.raises(ValueError, match="holds no complete checkpoint; train first"):
    read_params(tmp_path, {})


def test_a_tree_of_another_shape_is_refused_by_path(saved):
  with Checkpoints(saved, keep=2) as checkpoints:
    with pytest.raises(ValueError, match=r"params: embed is float32\[4, 3\], wanted float32\[4, 5\]"):
      checkpoints.restore(3, make_state(width=5))
    state = make_state()
    more = state.replace(params={**state.params, "head": jnp.zeros(2)})
    with pytest.raises(ValueError, match="params: head is missing"):
      checkpoints.restore(3, more)
    fewer = state.replace(params={"embed": state.params["embed"]})
    with pytest.raises(ValueError, match="layers/q is unexpected"):
      checkpoints.restore(3, fewer)
    with pytest.raises(ValueError, match=r"opt: .*mu/embed is unexpected"):
      checkpoints.restore(3, state.replace(opt_state=optax.sgd(0.1).init(state.params)))
    narrow = state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params))
    with pytest.raises(ValueError, match=r"embed is float32\[4, 3\], wanted bfloat16\[4, 3\]"):
      checkpoints.restore(3, narrow)


def test_buffers_may_be_donated_right_after_a_save(tmp_path):
  @partial(jax.jit, donate_argnums=0)
  def scramble(tree):
    return jax.tree.map(lambda x: -x, tree)

  state = make_state(1)
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    checkpoints.save(1, state, {})
    scramble(state)
    assert_equal(checkpoints.restore(1, jax.eval_shape(make_state)), make_state(1))


def test_old_steps_go_and_a_step_is_never_saved_twice(tmp_path):
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    assert checkpoints.latest() is None
    for step in (0, 1, 2):
      checkpoints.save(step, make_state(), {})
    assert checkpoints.steps() == [1, 2]
    with pytest.raises(ValueError, match="step 2 is there already"):
      checkpoints.save(2, make_state(), {})


def test_a_state_without_moments(tmp_path):
  state = make_state().replace(opt_state=optax.sgd(0.1).init({}))
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    checkpoints.save(5, state, {})
    assert_equal(checkpoints.restore(5, state), state)


def test_what_a_crash_leaves_is_no_step(saved, tmp_path):
  folder = tmp_path / "copy"
  shutil.copytree(saved, folder)
  shutil.copytree(saved / "3", folder / "6.orbax-checkpoint-tmp")
  shutil.copytree(saved / "3" / "params", folder / "7" / "params")
  with Checkpoints(folder, keep=3) as checkpoints:
    assert checkpoints.latest() == 3
    assert_equal(checkpoints.restore(3, make_state()), make_state(3))
    checkpoints.save(6, make_state(6), {})
    assert checkpoints.latest() == 6
  assert_equal(read_params(folder, jax.eval_shape(make_state).params), make_state(6).params)


def test_keeping_nothing_is_refused(tmp_path):
  with pytest.raises(ValueError, match="keep is 0"):
    Checkpoints(tmp_path, keep=0)


def test_a_failed_save_is_raised_and_leaves_no_step(tmp_path):
  with Checkpoints(tmp_path, keep=1) as checkpoints:
    with pytest.raises(TypeError):
      checkpoints.save(1, make_state(), {"not json": object()})
    assert checkpoints.latest() is None


SAVE_ON_FOUR_DEVICES = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import NamedSharding, PartitionSpec as P
from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.rl.optimizer import TrainState
sharding = NamedSharding(jax.make_mesh((4,), ("fsdp",)), P("fsdp"))
w = jax.device_put(jax.numpy.arange(8.0), sharding)
state = TrainState(params={"w": w}, opt_state=(w + 1,), step=jax.numpy.int32(7))
with Checkpoints(sys.argv[1], keep=1) as checkpoints:
  checkpoints.save(7, state, {})
  restored = checkpoints.restore(7, state)
  assert restored.params["w"].sharding == sharding and restored.opt_state[0].sharding == sharding
"""


@pytest.mark.slow
def test_shards_of_four_devices_are_restored_on_one(tmp_path):
  subprocess.run([sys.executable, "-c", SAVE_ON_FOUR_DEVICES, str(tmp_path)], check=True)
  w = jnp.arange(8.0)
  state = TrainState(params={"w": w}, opt_state=(w + 1,), step=jnp.int32(7))
  with Checkpoints(tmp_path, keep=None) as checkpoints:
    assert_equal(checkpoints.restore(7, jax.tree.map(jnp.zeros_like, state)), state)
    assert_equal(checkpoints.params(7), state.params)
