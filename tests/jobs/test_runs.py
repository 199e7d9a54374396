"""Whole runs in processes of their own: stopped, killed, resumed, exported, and refused with a clear word."""

import json
import signal
import time

import jax
import numpy as np
import pytest

from attrimem_jax.io import huggingface
from attrimem_jax.io.checkpoints import Checkpoints


def _metrics(workdir):
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def _params(workdir, tiny):
  _, like = huggingface.read(tiny[0])
  checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
  return checkpoints.latest(), jax.tree.leaves(checkpoints.params(checkpoints.latest())), jax.tree.leaves(like)


def _wait_for_step(workdir, step, process):
  """Waits until the checkpoint of a step is complete."""
  deadline = time.monotonic() + 300
  while time.monotonic() < deadline:
    if any(name.name.isdigit() and int(name.name) >= step for name in (workdir / "checkpoints").glob("*")):
      return
    assert process.poll() is None, process.stdout.read()
    time.sleep(0.05)
  raise AssertionError("no checkpoint came")


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
  """A run of four steps that nothing stopped."""
  workdir = tmp_path_factory.mktemp("whole")
  process = command(workdir)
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output
  return workdir, output


@pytest.mark.slow
def test_a_run_leaves_all_that_was_promised(whole):
  workdir, output = whole
  rows = _metrics(workdir)
  evaluated = [row for row in rows if "eval/accuracy" in row]
  assert [row["step"] for row in evaluated] == [0, 4]
  assert all(row["eval/accuracy_low"] <= row["eval/accuracy"] <= row["eval/accuracy_high"] for row in evaluated)
  assert evaluated[1]["eval/gain_low"] <= evaluated[1]["eval/gain"] <= evaluated[1]["eval/gain_high"]
  np.testing.assert_allclose(evaluated[1]["eval/gain"], evaluated[1]["eval/accuracy"] - evaluated[0]["eval/accuracy"])
  answers = [json.loads(line) for line in (workdir / "evaluations" / "step_000004.jsonl").read_text().splitlines()]
  assert np.mean([row["score"] for row in answers]) == pytest.approx(evaluated[1]["eval/accuracy"])
  trained = [row for row in rows if "train/reward" in row]
  assert [row["step"] for row in trained] == [1, 2, 3, 4]
  assert abs(trained[0]["train/kl"]) < 1e-4
  assert trained[0]["train/sampler_gap_max"] < 1e-4
  assert "held-out accuracy" in output
  assert (workdir / "report.html").stat().st_size > 1000
  for step in (1, 4):
    for line in (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines():
      for call in json.loads(line)["calls"]:
        sizes = {len(call[name]) for name in ("ids", "logps", "attribution", "advantages")}
        assert sizes == {len(call["ids"])}
        assert np.isfinite(call["advantages"]).all()


@pytest.mark.slow
def test_killed_and_started_again_ends_with_the_same_bits(whole, command, tiny, tmp_path):
  process = command(tmp_path)
  _wait_for_step(tmp_path, 2, process)
  process.send_signal(signal.SIGKILL)
  process.communicate()
  again = command(tmp_path)
  output, _ = again.communicate(timeout=600)
  assert again.returncode == 0, output
  assert "going on from step" in output
  assert _metrics(tmp_path) == _metrics(whole[0])
  for one, other in zip(_params(tmp_path, tiny)[1], _params(whole[0], tiny)[1], strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_frozen_models_that_wait_in_host_memory_change_no_bit(whole, command, tiny, tmp_path):
  output, _ = (process := command(tmp_path, "--config.train.offload=True")).communicate(timeout=600)
  assert process.returncode == 0, output
  assert _metrics(tmp_path) == _metrics(whole[0])
  for one, other in zip(_params(tmp_path, tiny)[1], _params(whole[0], tiny)[1], strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_sigterm_saves_at_the_end_of_the_step(command, tiny, tmp_path):
  process = command(tmp_path, "--config.train.checkpoint_every=100", "--config.train.steps=50")
  while "1/50" not in process.stdout.readline():
    assert process.poll() is None
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  step, trained, start = _params(tmp_path, tiny)
  assert 1 <= step < 50
  assert any(not np.array_equal(a, b) for a, b in zip(trained, start, strict=True))


@pytest.mark.slow
def test_the_export_of_a_run_holds_its_newest_weights(whole, command, tiny, tmp_path):
  process = command(whole[0], "--config.job=export", f"--config.export.out={tmp_path / 'hf'}")
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  _, params = huggingface.read(tmp_path / "hf")
  for one, other in zip(jax.tree.leaves(params), _params(whole[0], tiny)[1], strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_an_evaluation_keeps_its_answers_and_leaves_the_run_alone(whole, command):
  workdir = whole[0]
  before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
  for number, overrides in enumerate((["--config.eval.memory=policy"], ["--config.eval.memory=empty"])):
    process = command(workdir, "--config.job=evaluate", *overrides)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    found = json.loads((workdir / "evaluate" / f"{number:03d}.json").read_text())
    assert found["subject"] == (f"step 4 of {workdir}", "empty memory")[number]
    scores = [row["score"] for row in found["answers"]]
    assert found["metrics"]["accuracy"] == pytest.approx(np.mean(scores))
    if number == 0:  # the same as the run's own last evaluation
      last = [row for row in _metrics(workdir) if "eval/accuracy" in row][-1]
      assert {f"eval/{name}": value for name, value in found["metrics"].items()}.items() <= last.items()
  assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_nothing_is_exported_of_a_directory_without_a_checkpoint(command, tmp_path):
  process = command(tmp_path / "mistyped", "--config.job=export")
  output, _ = process.communicate(timeout=300)
  assert process.returncode != 0
  assert "holds no checkpoint to export" in output
  assert not (tmp_path / "mistyped").exists()


@pytest.mark.slow
def test_another_configuration_is_refused_in_the_same_directory(whole, command):
  process = command(whole[0], "--config.rl.lambda_=0.7")
  output, _ = process.communicate(timeout=300)
  assert process.returncode != 0
  assert "rl.lambda_: 0.3 there, 0.7 now" in output
  assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
  ("overrides", "words"),
  [
    (["--config.rl.lamda=1"], ["lamda", "lambda_"]),
    (["--config.policy.checkpoint=/nowhere"], ["config.policy.checkpoint", "/nowhere"]),
    (["--config.data.name=locomo", "--config.data.path=pyproject.toml"], ["pyproject.toml"]),
    (["--config.rl.micro_batches=7", "--config.rollout.temperature=-1"], ["rl.micro_batches", "rollout.temperature"]),
    (["--config.policy.max_prompt=5000"], ["2048"]),
    (["--config.attribution.gradients=1"], ["attribution.scorer", "Use masked or cached"]),
    (["--config.mesh.fsdp=64"], ["mesh"]),
  ],
)
def test_bad_configurations_are_refused_before_any_work(command, tmp_path, overrides, words):
  process = command(tmp_path / "run", *overrides)
  output, _ = process.communicate(timeout=300)
  assert process.returncode != 0
  for word in words:
    assert word in output
  assert not list((tmp_path / "run").glob("rollouts/*"))


@pytest.mark.slow
def test_an_unknown_preset_is_refused_with_the_known_ones(command, tmp_path):
  process = command(tmp_path / "run", recipe="grpo_token.py:qwen9")
  output, _ = process.communicate(timeout=300)
  assert process.returncode != 0
  assert "qwen9" in output
  assert "'smollm2'" in output


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo_outcome.py", "grpo_action.py"])
def test_the_other_recipes_run(command, tmp_path, recipe):
  process = command(tmp_path, "--config.train.steps=2", recipe=recipe)
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output
  assert [row["step"] for row in _metrics(tmp_path) if "train/reward" in row] == [1, 2]


@pytest.mark.slow
def test_credit_by_gradients_that_held_out_masks_gate(command, tmp_path):
  keys = {"scorer": "cached", "gradients": 1, "gate": 4, "explain": "contrast"}
  process = command(
    tmp_path,
    *[f"--config.attribution.{name}={value}" for name, value in keys.items()],
    "--config.policy.model=embedded:policy",  # random models write nothing that could earn credit
    "--config.answer.model=embedded:answer",
    "--config.train.steps=2",
  )
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output
  trained = [row for row in _metrics(tmp_path) if "train/reward" in row]
  assert [row["step"] for row in trained] == [1, 2]
  assert all(-1 <= row["train/attribution_lds"] <= 1 and row["train/credit_abs"] > 0 for row in trained)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["policy", "answer"])
def test_warm_start_trains_and_leaves_a_model(command, tmp_path, task):
  small = {"width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "hidden": 48, "layers": 1}
  process = command(
    tmp_path,
    *[f"--config.sft.init.{name}={value}" for name, value in small.items()],
    "--config.sft.batch=2",
    "--config.train.steps=6",
    "--config.train.log_every=1",
    "--config.optim.warmup=1",
    recipe=f"sft.py:{task}",
  )
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output
  losses = [row["train/loss"] for row in _metrics(tmp_path)]
  assert losses[-1] < losses[0]
  config, _ = huggingface.read(tmp_path / "export")
  assert config.width == 32
