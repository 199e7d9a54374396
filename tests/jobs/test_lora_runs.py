"""Whole runs that train low-rank factors: what they save, how they go on, what they export and begin from."""

import json

import jax
import numpy as np
import pytest

from attrimem_jax.io import huggingface
from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.nn.lora import Lora

LORA = (
  "--config.lora.targets=('q','o','down')",
  "--config.lora.rank=3",
  "--config.lora.alpha=6.0",
  "--config.optim.warmup=0",
)
FACTORS = Lora(3, 6.0, ("q", "o", "down"))


def _done(process):
  output, _ = process.communicate(timeout=600)
  assert process.returncode == 0, output
  return output


def _saved(workdir):
  checkpoints = Checkpoints(workdir / "checkpoints", keep=None)
  return checkpoints.params(checkpoints.latest())


def _metrics(workdir):
  rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
  """Two steps that nothing stopped."""
  workdir = tmp_path_factory.mktemp("whole")
  _done(command(workdir, *LORA, "--config.train.steps=2"))
  return workdir


@pytest.mark.slow
def test_checkpoints_hold_the_factors_alone_and_go_on_to_the_same_bits(whole, command, tiny, tmp_path):
  config, _ = huggingface.read(tiny[0])
  shapes = jax.tree.map(lambda leaf: leaf.shape, _saved(whole))
  assert shapes == jax.tree.map(lambda leaf: leaf.shape, FACTORS.abstract(config))
  _done(command(tmp_path, *LORA, "--config.train.steps=1"))
  output = _done(command(tmp_path, *LORA, "--config.train.steps=2"))
  assert "going on from step 1" in output
  jax.tree.map(np.testing.assert_array_equal, _saved(tmp_path), _saved(whole))
  trained = {run: [row for row in _metrics(run) if "train/loss" in row] for run in (tmp_path, whole)}
  assert trained[tmp_path] == trained[whole]
  assert abs(trained[whole][0]["train/kl"]) < 1e-6
  assert trained[whole][0]["train/sampler_gap_max"] < 1e-4
  assert trained[whole][1]["train/sampler_gap_max"] < 1e-4, "the sampler reads the factors too"


@pytest.mark.slow
def test_another_rank_is_another_run(whole, command):
  process = command(whole, *LORA, "--config.lora.rank=4")
  output, _ = process.communicate(timeout=300)
  assert process.returncode != 0
  assert "lora.rank: 3 there, 4 now" in output


@pytest.mark.slow
def test_the_export_is_the_merged_model_and_a_new_run_begins_from_it(whole, command, tiny, tmp_path):
  """The command names no factors: the run's own configuration does."""
  _done(command(whole, "--config.job=export", f"--config.export.out={tmp_path / 'hf'}"))
  _, frozen = huggingface.read(tiny[0])
  _, exported = huggingface.read(tmp_path / "hf")
  jax.tree.map(np.testing.assert_array_equal, exported, FACTORS.merge(frozen, _saved(whole)))
  assert np.abs(exported["layers"]["q"] - frozen["layers"]["q"]).max() > 1e-4
  later = tmp_path / "later"
  _done(command(later, *LORA, f"--config.policy.checkpoint={whole}", "--config.train.steps=1"))
  first = next(row for row in _metrics(later) if "train/kl" in row)
  assert abs(first["train/kl"]) < 1e-6, "the reference is what the earlier run had reached"
  _done(command(later, "--config.job=export", f"--config.export.out={tmp_path / 'second'}"))
  _, second = huggingface.read(tmp_path / "second")
  jax.tree.map(np.testing.assert_array_equal, second, FACTORS.merge(exported, _saved(later)))


@pytest.mark.slow
def test_an_evaluation_of_the_merged_model_is_that_of_the_run(whole, command):
  _done(command(whole, "--config.job=evaluate"))
  found = json.loads((whole / "evaluate" / "000.json").read_text())["metrics"]
  last = next(row for row in reversed(_metrics(whole)) if "eval/accuracy" in row)
  assert {name: found[name] for name in ("accuracy", "questions", "memory_tokens")} == {
    name: last[f"eval/{name}"] for name in ("accuracy", "questions", "memory_tokens")
  }


@pytest.mark.slow
def test_a_supervised_run_ends_with_the_merged_model(command, tiny, tmp_path):
  widths = [f"--config.sft.widths.{n}={w}" for n, w in (("rows", 2), ("prefix", 256), ("prompt", 128))]
  small = (
    "--config.train.steps=2",
    "--config.sft.batch=2",
    "--config.optim.name=adamw",
    "--config.export.dtype=float32",
  )
  _done(command(tmp_path, *LORA, *widths, *small, recipe="sft.py"))
  _, frozen = huggingface.read(tiny[0])
  _, exported = huggingface.read(tmp_path / "export")
  jax.tree.map(np.testing.assert_array_equal, exported, FACTORS.merge(frozen, _saved(tmp_path)))
  np.testing.assert_array_equal(exported["embed"], frozen["embed"])
  assert np.abs(exported["layers"]["down"] - frozen["layers"]["down"]).max() > 1e-4
