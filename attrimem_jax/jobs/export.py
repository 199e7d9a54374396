"""Turns the newest parameters of a run, or a model, into a Hugging Face folder, and proves it by loading it again."""

import pathlib

import jax
import numpy as np
from ml_collections import ConfigDict

from attrimem_jax.io import huggingface
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run


def run_export(config: ConfigDict, run: Run) -> None:
  """Job `export`: writes the policy to `export.out`, by default <workdir>/export.

  Raises:
    ValueError: there is no checkpoint, so what would be written is the model that training started from.
  """
  if run.newest is None and not config.policy.checkpoint:
    raise ValueError(
      f"{run.workdir} holds no checkpoint to export: give the --workdir of a run that has trained, or that of another "
      "run as config.policy.checkpoint"
    )
  model = setup.policy_model(config, run)
  if run.newest is not None:
    print(f"step {run.newest} of {run.workdir}", flush=True)
  model = setup.with_params(model, setup.newest_params(run, model))
  export(model, config, pathlib.Path(config.export.out or run.workdir / "export"))


def export(model: LanguageModel, config: ConfigDict, folder: pathlib.Path) -> None:
  """Writes `model` to `folder` and, if `export.verify`, reads it back: here, and in torch transformers if installed.

  Raises:
    ValueError: a parameter is not finite; or what was read back differs from what was written.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
    if not np.isfinite(leaf).all():
      raise ValueError(
        f"{model.name}: parameter {jax.tree_util.keystr(path)} is not finite, so the training broke; export an earlier "
        "run, or train again with a lower config.optim.lr"
      )
  huggingface.write(
    folder, model.config, model.params, model.tokenizer, model.config.to_hf(), dtype=config.export.dtype
  )
  print(f"exported {model.name} to {folder}", flush=True)
  if config.export.verify:
    print(huggingface.verify(folder, model.params), flush=True)
