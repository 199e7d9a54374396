"""A run directory belongs to one configuration, and to one process at a time."""

import pytest

from attrimem_jax import config as schema
from attrimem_jax.jobs.run import Run


def _config(**changes):
  config = schema.default()
  for name, value in changes.items():
    config.optim[name] = value
  return config


def test_two_processes_cannot_share_a_run(tmp_path):
  with Run(_config(), str(tmp_path)), pytest.raises(ValueError, match="another process is running in"):
    Run(_config(), str(tmp_path))
  with Run(_config(), str(tmp_path)):
    pass


def test_evaluation_may_look_at_a_run_that_goes_on(tmp_path):
  config = _config()
  config.job = "evaluate"
  with Run(_config(), str(tmp_path)), Run(config, str(tmp_path)):
    pass


def test_another_configuration_is_refused_by_name(tmp_path):
  with Run(_config(lr=1.0), str(tmp_path)):
    pass
  with pytest.raises(ValueError, match=r"another configuration \(optim.lr: 1.0 there, 2.0 now\)"):
    Run(_config(lr=2.0), str(tmp_path))


@pytest.mark.parametrize(("schedule", "free"), [("constant", True), ("cosine", False)])
def test_a_run_may_be_made_longer_where_no_rate_hangs_on_its_length(tmp_path, schedule, free):
  config = _config(schedule=schedule)
  with Run(config, str(tmp_path)):
    pass
  config.train.steps += 1
  if free:
    with Run(config, str(tmp_path)):
      pass
  else:
    with pytest.raises(ValueError, match=r"train.steps: 400 there, 401 now"):
      Run(config, str(tmp_path))
