"""Runs one job from a recipe.

  python -m attrimem_jax.main --config=configs/grpo_token.py[:preset] [--config.key=value …] [--workdir=runs/name]

The recipe and the overrides give one locked configuration; all that is wrong with it is reported before any work
starts. The run directory (`--workdir`) then holds config.json, metrics.jsonl, TensorBoard events, rollouts,
checkpoints and a report. The same command again goes on where the run stopped, with the same numbers as if it had not.
"""

import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Recipe, e.g. configs/grpo_token.py:smollm2.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", "", "Run directory; by default runs/<recipe>[-<preset>].")

JOBS = {
  "train": ("grpo", "run_grpo"),
  "sft": ("sft", "run_sft"),
  "evaluate": ("evaluate", "run_evaluate"),
  "export": ("export", "run_export"),
}


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unknown arguments {argv[1:]}: give options as --config.key=value")
  import jax  # only once the flags are parsed, so that --help is quick

  from attrimem_jax import validation
  from attrimem_jax.io import models
  from attrimem_jax.jobs.run import Run

  logging.set_verbosity(logging.WARNING)
  if not os.environ.get(
    "JAX_COMPILATION_CACHE_DIR"
  ):  # a run that goes on, or a second one, then compiles nothing again
    jax.config.update("jax_compilation_cache_dir", str(models.cache() / "compiled"))
  config = _CONFIG.value
  if config is None:
    raise ValueError("no recipe given: add --config=configs/grpo_token.py")
  validation.validate(config, jax.device_count())
  with Run(config, _WORKDIR.value or _default_workdir()) as run:
    job, function = JOBS[config.job]
    getattr(importlib.import_module(f"attrimem_jax.jobs.{job}"), function)(config, run)


def _default_workdir() -> str:
  recipe, _, preset = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  name = pathlib.Path(recipe).stem
  return str(pathlib.Path("runs") / (f"{name}-{preset}" if preset else name))


def cli() -> None:
  """Entry point of the `attrimem` command: errors that a user can mend are one line, not a traceback."""
  try:
    app.run(main)
  except ValueError as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  cli()
