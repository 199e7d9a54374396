"""Two real processes train as one does, stop together, and do not wait for one that is gone."""

import json
import signal
import socket
import time

import jax
import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax import validation
from attrimem_jax.io.checkpoints import Checkpoints

TIMEOUT = 20  # seconds until a process counts as lost
MESH = ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.rollout.histories=4", "--config.optim.lr=0.001"]
# Steps of plain size instead of Adam's signs, which would turn rounding of a gradient near zero into a whole step.
ONE_STEP = [
  *MESH,
  "--config.train.steps=1",
  "--config.optim.eps=0.01",
  "--config.optim.warmup=0",
  "--config.policy.model=embedded:policy",  # random models earn nothing that could move a weight
  "--config.answer.model=embedded:answer",
]


@pytest.fixture
def together(command):
  """Starts two processes of two devices each that make one run; ends those that are left, one by one."""
  started = []

  def start(workdir, *overrides, of_second=()):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free.getsockname()[1]}"
    for number in range(2):
      variables = {
        "ATTRIMEM_COORDINATOR": address,
        "ATTRIMEM_PROCESSES": "2",
        "ATTRIMEM_PROCESS": str(number),
        "JAX_NUM_CPU_DEVICES": "2",
      }
      own = [f"--config.hosts.timeout={TIMEOUT}", *overrides, *(of_second if number else ())]
      started.append(command(workdir, *own, variables=variables))
    return started

  yield start
  for process in started:
    if process.poll() is None:
      process.kill()
    process.communicate()


def _rows(workdir):
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
  return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def _params(workdir):
  with Checkpoints(workdir / "checkpoints", keep=None) as checkpoints:
    return checkpoints.params(checkpoints.steps()[-1])


def _wait_for_first_step(process):
  for line in process.stdout:
    if line.startswith("1/"):
      return
  raise AssertionError("the run ended before its first step")


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(together, command, tmp_path):
  alone = command(tmp_path / "one", *ONE_STEP, variables={"JAX_NUM_CPU_DEVICES": "4"})
  output, _ = alone.communicate(timeout=300)
  assert alone.returncode == 0, output
  first, second = together(tmp_path / "two", *ONE_STEP)
  spoken, silent = (process.communicate(timeout=300)[0] for process in (first, second))
  assert (first.returncode, second.returncode) == (0, 0), spoken + silent
  assert "held-out accuracy" in spoken
  assert "held-out accuracy" not in silent
  one, two = _rows(tmp_path / "one"), _rows(tmp_path / "two")
  assert [row["step"] for row in two] == [0, 1, 1], "every row once, whoever computes"
  assert two[1]["train/update_norm"] > 0
  for mine, theirs in zip(two, one, strict=True):
    assert mine.keys() == theirs.keys()
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), atol=1e-5, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=0),
    _params(tmp_path / "two"),
    _params(tmp_path / "one"),
  )
  written = sorted((tmp_path / "two" / "checkpoints" / "1" / "params").glob("ocdbt.process_*"))
  assert [folder.name for folder in written] == ["ocdbt.process_0", "ocdbt.process_1"], "each saves its share"


@pytest.mark.slow
def test_a_stop_asked_of_one_stops_both_and_the_run_goes_on(together, command, tmp_path):
  first, second = together(tmp_path, *MESH, "--config.train.steps=40", "--config.train.checkpoint_every=100")
  _wait_for_first_step(first)
  second.send_signal(signal.SIGTERM)
  outputs = [process.communicate(timeout=300)[0] for process in (first, second)]
  assert (first.returncode, second.returncode) == (0, 0), outputs
  with Checkpoints(tmp_path / "checkpoints", keep=None) as checkpoints:
    saved = checkpoints.steps()[-1]
  assert 1 <= saved < 40
  steps = f"--config.train.steps={saved + 1}"
  again = command(tmp_path, *MESH, steps, variables={"JAX_NUM_CPU_DEVICES": "4"})  # as one process on four devices
  output, _ = again.communicate(timeout=300)
  assert again.returncode == 0, output
  assert f"going on from step {saved}" in output
  assert [row["step"] for row in _rows(tmp_path) if "train/loss" in row] == list(range(1, saved + 2))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other(together, tmp_path, lost):
  processes = together(tmp_path, *MESH, "--config.train.steps=40")
  _wait_for_first_step(processes[0])
  processes[lost].kill()
  start = time.monotonic()
  output, _ = processes[1 - lost].communicate(timeout=5 * TIMEOUT)  # raises where it hangs
  assert processes[1 - lost].returncode != 0
  assert time.monotonic() - start < 3 * TIMEOUT, "bounded by config.hosts.timeout"
  assert "another task died" in output or "error in process" in output


@pytest.mark.slow
def test_a_process_with_another_mesh_says_so_and_ends_both(together, tmp_path):
  first, second = together(tmp_path, *MESH, of_second=["--config.mesh.tensor=2"])
  output, _ = second.communicate(timeout=100)
  assert second.returncode == 1
  assert "config.mesh: the axes multiply to 8, but there are 4 devices of 2 processes" in output
  assert "Traceback" not in output
  first.communicate(timeout=5 * TIMEOUT)
  assert first.returncode != 0


def _problems(**hosts):
  config = schema.default()
  config.job = hosts.pop("job", "train")
  config.hosts.update(hosts)
  try:
    validation.validate(config)
  except ValueError as error:
    return str(error)
  return ""


@pytest.mark.parametrize(
  ("hosts", "message"),
  [
    ({"processes": 2}, "config.hosts.processes: is set without config.hosts.coordinator (got 2)"),
    ({"process": 0}, "config.hosts.process: is set without config.hosts.coordinator (got 0)"),
    ({"coordinator": "here", "processes": 2, "process": 0}, "is no address (got 'here'). Use host:port"),
    ({"coordinator": "a:1"}, "config.hosts.processes: how many processes are there? (got 0)"),
    ({"coordinator": "a:1", "processes": 2}, "is not the number of one of 2 processes (got -1). Use 0 to 1"),
    ({"coordinator": "a:1", "processes": 2, "process": 2}, "(got 2). Use 0 to 1"),
    ({"coordinator": "auto", "job": "export"}, "job 'export' runs in one process (got 'auto')"),
  ],
)
def test_what_cannot_be_joined_is_told_before_anything_waits(hosts, message):
  assert message in _problems(**hosts)


@pytest.mark.parametrize("hosts", [{}, {"coordinator": "auto"}, {"coordinator": "a:1", "processes": 2, "process": 1}])
def test_what_can_be_joined_passes(hosts):
  assert _problems(**hosts) == ""


def test_the_environment_is_the_default(monkeypatch):
  monkeypatch.setenv("ATTRIMEM_COORDINATOR", "a:1")
  monkeypatch.setenv("ATTRIMEM_PROCESSES", "4")
  monkeypatch.setenv("ATTRIMEM_PROCESS", "0")
  hosts = schema.default().hosts
  assert (hosts.coordinator, hosts.processes, hosts.process) == ("a:1", 4, 0)
  monkeypatch.setenv("ATTRIMEM_PROCESS", "first")
  with pytest.raises(ValueError, match=r"\$ATTRIMEM_PROCESS is 'first': give a whole number"):
    schema.default()


def test_a_mesh_leaves_out_no_device_of_another_process():
  config = schema.default()
  validation.validate(config, 4)
  with pytest.raises(ValueError, match="multiply to 1, but there are 4 devices of 2 processes"):
    validation.validate(config, 4, 2)


@pytest.mark.parametrize(("job", "key", "value"), [("sft", "sft.batch", 6), ("train", "rollout.histories", 6)])
def test_a_batch_that_does_not_split_over_the_mesh_is_refused(job, key, value):
  config = schema.default()
  config.job, config.mesh.data, config.mesh.fsdp = job, 2, 2
  with config.unlocked():
    config.update_from_flattened_dict({key: value})
  with pytest.raises(ValueError, match="split over 4 devices"):
    validation.validate(config, 4)
