"""Parts of a job that depend on other runs."""

import jax
import numpy as np
import optax
import pytest

from attrimem_jax import config as schema
from attrimem_jax.io import huggingface
from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run
from attrimem_jax.rl.optimizer import init_state


def _save(folder, params, step):
  with Checkpoints(folder / "checkpoints", keep=5) as checkpoints:
    scaled = jax.tree.map(lambda x: np.full_like(x, step), params)
    checkpoints.save(step, init_state(optax.sgd(0.1), scaled), {})


def test_a_run_keeps_the_step_of_the_other_run_that_it_began_from(tiny, tmp_path):
  """It is the reference of the KL: a newer one would change the loss of a run that goes on."""
  _, params = huggingface.read(tiny[0])
  _save(tmp_path / "earlier", params, 3)
  config = schema.default()
  config.policy.model, config.policy.checkpoint = str(tiny[0]), str(tmp_path / "earlier")
  for step in (3, 7):
    with Run(config, tmp_path / "run") as run:
      model = setup.policy_model(config, run)
      run.begin(init_state(optax.sgd(0.1), {"w": np.zeros(2, np.float32)}))
    assert all((leaf == 3).all() for leaf in jax.tree.leaves(model.params))
    _save(tmp_path / "earlier", params, step + 4)
  with Run(config, tmp_path / "new") as run:  # a new run takes the newest
    assert all((leaf == 11).all() for leaf in jax.tree.leaves(setup.policy_model(config, run).params))


def test_a_run_without_checkpoints_is_no_start(tiny, tmp_path):
  (tmp_path / "earlier" / "checkpoints").mkdir(parents=True)
  config = schema.default()
  config.policy.model, config.policy.checkpoint = str(tiny[0]), str(tmp_path / "earlier")
  with Run(config, tmp_path / "run") as run, pytest.raises(ValueError, match="holds no complete checkpoint"):
    setup.policy_model(config, run)
