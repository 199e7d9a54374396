"""A run directory belongs to one configuration and one process; a job that does not train changes nothing in it."""

import json

import jax
import numpy as np
import optax
import pytest

from attrimem_jax import config as schema
from attrimem_jax.io.metrics import write_rollouts
from attrimem_jax.jobs.run import Run
from attrimem_jax.rl.optimizer import init_state

OTHER_JOBS = ("evaluate", "export", "attribute")


def _config(job="train", **changes):
  config = schema.default()
  config.job = job
  for name, value in changes.items():
    config.optim[name] = value
  return config


def _state(value=0.0):
  return init_state(optax.sgd(0.1), {"w": np.full(2, value, np.float32)})


def _begun(tmp_path, config=None):
  with Run(config or _config(), tmp_path) as run:
    return run.begin(_state())


@pytest.fixture
def trained(tmp_path):
  """A run with checkpoints at steps 50 and 100, and metrics, rollouts and evaluations up to step 100."""
  with Run(_config(), tmp_path) as run:
    state = run.begin(_state())
    for step in range(1, 101):
      run.log(step, {"train/loss": 0.5})
      if step % 50 == 0:
        run.rollouts(step, [{"reward": 1.0}])
        run.evaluation(step, [{"score": 1.0}])
        run.log(step, {"eval/accuracy": 1.0})
        run.save(step, state.replace(step=np.int32(step), params={"w": np.full(2, step, np.float32)}))
  return tmp_path


def _files(folder):
  return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_two_processes_cannot_share_a_run(tmp_path):
  with Run(_config(), tmp_path), pytest.raises(ValueError, match="another process is running in"):
    Run(_config(), tmp_path)
  with Run(_config(), tmp_path):
    pass


@pytest.mark.parametrize("job", OTHER_JOBS)
def test_jobs_that_do_not_train_change_nothing(trained, job):
  before = _files(trained)
  with Run(_config(job, lr=3.0), trained) as run:
    assert run.newest == 100
  assert _files(trained) == before
  for folder in (trained / "checkpoints").iterdir():  # also where the checkpoints are gone
    folder.rename(trained / f"elsewhere-{folder.name}")
  with Run(_config(job), trained) as run:
    assert run.newest is None
  assert (trained / "metrics.jsonl").read_bytes() == before[trained / "metrics.jsonl"]
  assert (trained / "rollouts" / "step_000100.jsonl").exists()


@pytest.mark.parametrize("job", OTHER_JOBS)
def test_they_may_look_at_a_run_that_goes_on(tmp_path, job):
  with Run(_config(), tmp_path), Run(_config(job), tmp_path):
    pass


def test_what_came_after_the_checkpoint_is_dropped(trained):
  config = _config()
  with Run(config, trained) as run:
    run.begin(_state())
    run.log(101, {"train/loss": 0.5})
    run.rollouts(101, [])
    run.evaluation(101, [])
  with Run(config, trained) as run:
    assert run.begin(_state()).step == 100
    assert [row["step"] for row in run.rows()][-2:] == [100, 100]
    assert run.evaluated(100)
    assert not run.evaluated(99)
  assert {path.name for path in trained.glob("*/step_000101.jsonl")} == set()


def test_another_configuration_is_refused_by_name(tmp_path):
  _begun(tmp_path, _config(lr=1.0))
  with pytest.raises(ValueError, match=r"another configuration \(optim.lr: 1.0 there, 2.0 now\)"):
    Run(_config(lr=2.0), tmp_path)


def test_a_run_that_never_began_does_not_bar_the_corrected_command(tmp_path):
  with Run(_config(lr=1.0), tmp_path):
    pass  # its model was not found
  _begun(tmp_path, _config(lr=2.0))


@pytest.mark.parametrize(("schedule", "free"), [("constant", True), ("cosine", False)])
def test_a_run_may_be_made_longer_where_no_rate_hangs_on_its_length(tmp_path, schedule, free):
  config = _config(schedule=schedule)
  _begun(tmp_path, config)
  config.train.steps += 1
  if free:
    _begun(tmp_path, config)
  else:
    with pytest.raises(ValueError, match=r"train.steps: 400 there, 401 now"):
      Run(config, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_taken(trained, damage, capsys):
  item = trained / "checkpoints" / "100" / "params"
  for path in sorted(item.rglob("*"), reverse=True):
    if path.is_file():
      path.unlink() if damage == "removed" else path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "removed":
      path.rmdir()
  if damage == "removed":
    item.rmdir()
  with Run(_config(), trained) as run:
    state = run.begin(_state())
    assert state.step == 50
    np.testing.assert_array_equal(state.params["w"], [50, 50])
    assert max(row["step"] for row in run.rows()) == 50
    run.save(100, state)  # the step is free again
  assert "100.broken1, and the run goes on from step 50" in capsys.readouterr().out
  assert (trained / "checkpoints" / "100.broken1").is_dir()


def test_checkpoints_that_are_all_damaged_stop_the_run(trained):
  for path in (trained / "checkpoints").rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  before = (trained / "metrics.jsonl").read_bytes()
  with Run(_config(), trained) as run, pytest.raises(ValueError, match=r"cannot be read .* no older one to go on from"):
    run.begin(_state())
  assert (trained / "metrics.jsonl").read_bytes() == before


def test_metrics_without_their_checkpoints_are_not_thrown_away(trained):
  (trained / "checkpoints").rename(trained / "elsewhere")
  before = (trained / "metrics.jsonl").read_bytes()
  with Run(_config(), trained) as run, pytest.raises(ValueError, match="metrics up to step 100, but no checkpoint"):
    run.begin(_state())
  assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_damaged_first_evaluation_is_told_at_the_start(trained):
  write_rollouts(trained, 0, [{"score": 1.0}], "evaluations")
  path = trained / "evaluations" / "step_000000.jsonl"
  path.write_text(path.read_text()[:5])
  with Run(_config(), trained) as run, pytest.raises(ValueError, match=r"step_000000.jsonl is damaged"):
    run.begin(_state())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["train/loss", "train/grad_norm"])
def test_a_loss_that_is_no_number_stops_the_run_at_the_last_good_checkpoint(trained, name, value):
  with Run(_config(), trained) as run:
    run.begin(_state())
    with pytest.raises(
      ValueError, match=rf"step 101: {name} is {value}.*the newest checkpoint is of step 100.*optim.lr"
    ):
      run.log(101, {name: value})
    assert run.newest == 100


def test_a_choice_made_at_the_start_holds_when_the_run_goes_on(tmp_path):
  for offered in (7, 8):
    with Run(_config(), tmp_path) as run:
      assert run.pinned("step", lambda value=offered: value) == 7
      run.begin(_state())
  assert json.loads((tmp_path / "config.json").read_text())["pinned"] == {"step": 7}


@pytest.mark.parametrize("content", ["{", "[1]", '"x"'])
def test_a_damaged_configuration_is_named(tmp_path, content):
  (tmp_path / "config.json").write_text(content)
  with pytest.raises(ValueError, match=r"config.json is no configuration"):
    Run(_config(), tmp_path)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path, place):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match=r"cannot be made .*: give another --workdir"):
    Run(_config(), tmp_path / place)


def test_state_that_was_saved_is_what_comes_back(trained):
  with Run(_config(), trained) as run:
    state = run.begin(_state())
  jax.tree.map(np.testing.assert_array_equal, state.params, {"w": np.full(2, 100, np.float32)})
