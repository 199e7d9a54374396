"""A process that is killed while it saves loses that save and nothing else."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.rl.optimizer import TrainState

# Kills itself at the moment when the second save renames what it wrote into its place.
SAVE_AND_DIE = """
import os, pathlib, signal, sys
import jax.numpy as jnp
from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.rl.optimizer import TrainState

def state(step):
  w = jnp.full((64, 64), float(step))
  return TrainState(params={"w": w}, opt_state=(w[0, :3],), step=jnp.int32(step))

checkpoints = Checkpoints(sys.argv[1], keep=3)
checkpoints.save(1, state(1), {"n": 1})

def die(*_, **__):
  os.kill(os.getpid(), signal.SIGKILL)

for owner in (os, pathlib.Path):
  owner.rename = owner.replace = die
checkpoints.save(2, state(2), {"n": 2})
print("survived")
"""


@pytest.mark.slow
def test_sigkill_in_the_middle_of_a_save_leaves_the_step_before(tmp_path: pathlib.Path):
  done = subprocess.run(
    [sys.executable, "-c", SAVE_AND_DIE, str(tmp_path)], capture_output=True, text=True, check=False
  )
  assert done.returncode == -9, done.stdout + done.stderr
  assert len(list(tmp_path.iterdir())) == 2, "the second save had begun"
  target = TrainState(params={"w": jnp.zeros((64, 64))}, opt_state=(jnp.zeros(3),), step=jnp.int32(0))
  with Checkpoints(tmp_path, keep=3) as checkpoints:
    assert checkpoints.latest() == 1
    assert checkpoints.meta(1) == {"n": 1}
    for leaf in jax.tree.leaves(checkpoints.restore(1, target)):
      np.testing.assert_array_equal(leaf, 1)
    checkpoints.save(2, target, {})
    assert checkpoints.steps() == [1, 2]
