"""Runs one job from a recipe.

  python -m attrimem_jax.main --config=configs/grpo_token.py[:preset] [--config.key=value …] [--workdir=runs/name]

The recipe and the overrides give one locked configuration; all that is wrong with it is reported before any work
starts. The run directory (`--workdir`) then holds config.json, metrics.jsonl, TensorBoard events, rollouts,
checkpoints and a report. The same command again goes on where the run stopped, with the same numbers as if it had not.
With `config.hosts` the command is started once per process, on any number of machines (`launch/`).
"""

import difflib
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from attrimem_jax import config as schema

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "Recipe, e.g. configs/grpo_token.py:smollm2.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", "", "Run directory; by default runs/<recipe>[-<preset>].")

JOBS = {
  "train": ("grpo", "run_grpo"),
  "sft": ("sft", "run_sft"),
  "evaluate": ("evaluate", "run_evaluate"),
  "benchmark": ("benchmark", "run_benchmark"),
  "attribute": ("attribute", "run_attribute"),
  "export": ("export", "run_export"),
  "plan": ("plan", "run_plan"),
  "retention": ("retention", "run_retention"),
  "study": ("study", "run_study"),
  "serve": ("serve", "run_serve"),
}


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f"unknown arguments {argv[1:]}: give options as --config.key=value")
  import jax  # only once the flags are parsed, so that --help is quick

  from attrimem_jax import validation
  from attrimem_jax.io import hosts, models
  from attrimem_jax.jobs.run import Run

  logging.set_verbosity(logging.WARNING)
  if not os.environ.get(
    "JAX_COMPILATION_CACHE_DIR"
  ):  # a run that goes on, or a second one, then compiles nothing again
    jax.config.update("jax_compilation_cache_dir", str(models.cache() / "compiled"))
  config = _CONFIG.value
  if config.job == "plan":  # compiles for devices that are not here
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(1, config.mesh.data * config.mesh.fsdp * config.mesh.tensor))
  if config.hosts.coordinator:
    validation.validate(config)  # rather than after waiting for the others
  with hosts.joined(config.hosts):
    validation.validate(config, jax.device_count(), jax.process_count())
    with Run(config, _WORKDIR.value or _default_workdir()) as run:
      job, function = JOBS[config.job]
      getattr(importlib.import_module(f"attrimem_jax.jobs.{job}"), function)(config, run)


def _default_workdir() -> str:
  recipe, _, preset = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
  name = pathlib.Path(recipe).stem
  return str(pathlib.Path("runs") / (f"{name}-{preset}" if preset else name))


def check_arguments(arguments: Sequence[str]) -> None:
  """Loads the recipe and looks up every overridden key, so that a mistake is a sentence and not a traceback.

  Raises:
    ValueError: no recipe, no such recipe or preset, or keys that it does not have (all of them at once).
  """
  if any(argument.lstrip("-").startswith("help") for argument in arguments):
    return
  following = zip(arguments, [*arguments[1:], ""], strict=False)
  named = [b if a == "--config" else a.removeprefix("--config=") for a, b in following if a.split("=")[0] == "--config"]
  if not named or not named[-1]:
    raise ValueError("no recipe given: add --config=configs/grpo_token.py")
  recipe, _, preset = named[-1].partition(":")
  config = schema.recipe(recipe, preset)
  keys = [argument[len("--config.") :].split("=")[0] for argument in arguments if argument.startswith("--config.")]
  problems = [f"config.{key}: there is no such key{_nearest(config, key)}" for key in keys if not _has(config, key)]
  problems += [
    f"config.{key}: a part of a value cannot be set; give the whole of config.{key.split('[')[0]}"
    for key in keys
    if "[" in key and _has(config, key)
  ]
  if problems:
    raise ValueError("; ".join(problems))


def _has(config: ConfigDict, key: str) -> bool:
  value = config
  for part in key.split("[")[0].split("."):
    if not isinstance(value, ConfigDict) or part not in value:
      return False
    value = value[part]
  return True


def _nearest(config: ConfigDict, key: str) -> str:
  known = list(schema.flat(config.to_dict()))
  same = [name for name in known if name.split(".")[-1] == key.split(".")[-1]]
  found = same or difflib.get_close_matches(key, known, n=3)
  return f"; did you mean {', '.join(found)}?" if found else ""


def cli() -> None:
  """Entry point of the `attrimem` command: errors that a user can mend are one line, not a traceback."""
  try:
    check_arguments(sys.argv[1:])
    app.run(main)
  except (ValueError, OSError) as error:  # the latter speak of a file, or of a full disk
    sys.exit(f"error: {error}")
  except KeyboardInterrupt:
    sys.exit("interrupted")


if __name__ == "__main__":
  cli()
