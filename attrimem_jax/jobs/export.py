"""Turns the newest parameters of a run, or a model, into a Hugging Face folder, and proves it by loading it again."""

import pathlib

from ml_collections import ConfigDict

from attrimem_jax.io import huggingface
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run


def run_export(config: ConfigDict, run: Run) -> None:
  """Job `export`: writes the policy to `export.out`, by default <workdir>/export."""
  model = setup.policy_model(config)
  model = setup.with_params(model, setup.newest_params(run, model))
  export(model, config, pathlib.Path(config.export.out or run.workdir / "export"))


def export(model: LanguageModel, config: ConfigDict, folder: pathlib.Path) -> None:
  """Writes `model` to `folder` and, if `export.verify`, reads it back: here, and in torch transformers if installed.

  Raises:
    ValueError: what was read back differs from what was written.
  """
  huggingface.write(
    folder, model.config, model.params, model.tokenizer, model.config.to_hf(), dtype=config.export.dtype
  )
  print(f"exported {model.name} to {folder}", flush=True)
  if config.export.verify:
    print(huggingface.verify(folder, model.params), flush=True)
