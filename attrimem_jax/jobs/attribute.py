"""Explains answers by the texts that they were given from: job `attribute`."""

import json
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from attrimem_jax import checks
from attrimem_jax import config as schema
from attrimem_jax.explain import attribute, make_folder
from attrimem_jax.io import models
from attrimem_jax.io.metrics import write_json
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run

_ASKED = "asked.json"  # the case and the settings that an attribution is of; written last


def run_attribute(config: ConfigDict, run: Run) -> None:
  """Writes attribution.json and attribution.html for every case: to the run directory, or to folders 000, 001, … of it.

  A case that the directory holds already is left alone, so that a run that was stopped goes on.

  Raises:
    ValueError: the file of cases is malformed, or a case cannot be explained; it says which. Or the directory holds the
      attribution of something else.
  """
  cases = read_cases(config)
  folders = [run.workdir if len(cases) == 1 else run.workdir / f"{number:03d}" for number in range(len(cases))]
  wanted = [_settings(config) | {"case": case} for case in cases]
  done = [_is_done(*pair) for pair in zip(folders, wanted, strict=True)]
  for folder in folders:
    make_folder(folder)
  model = models.load(config.answer.model)
  for number, (case, folder) in enumerate(zip(cases, folders, strict=True)):
    if done[number]:
      print(f"{number + 1}/{len(cases)}  {folder} is there already", flush=True)
      continue
    try:
      found = attribute(
        case["context"],
        case["question"],
        case.get("answer"),
        model=model,
        sources=config.explain.sources,
        prompts=setup.prompts(config.answer.prompts),
        gradients=config.attribution.gradients,
        masks=config.explain.masks or None,
        scorer=config.attribution.scorer,
        penalty=config.attribution.penalty,
        alpha=config.attribution.alpha,
        keep=config.attribution.keep,
        held_out=config.explain.held_out,
        max_new_tokens=config.answer.max_new_tokens,
        seed=config.seed,
        dtype=config.answer.dtype,
        part=case.get("part") or "",
      )
    except ValueError as error:
      raise ValueError(f"case {number} ({case['question']!r}): {error}") from error
    page = found.save(folder)
    write_json(folder / _ASKED, wanted[number])
    print(f"{number + 1}/{len(cases)}  {found!r}\n{page}", flush=True)
    if run.stopping:
      return


def _settings(config: ConfigDict) -> dict[str, Any]:
  """All that decides the attribution of a case, as JSON holds it."""
  explain = {name: value for name, value in config.explain.items() if name in ("sources", "masks", "held_out")}
  attribution = {name: config.attribution[name] for name in ("gradients", "scorer", "penalty", "alpha", "keep")}
  settings = {"explain": explain, "attribution": attribution, "answer": config.answer.to_dict(), "seed": config.seed}
  return json.loads(json.dumps(settings))


def _is_done(folder: pathlib.Path, wanted: dict[str, Any]) -> bool:
  """Whether the folder holds the attribution of this very case."""
  asked = folder / _ASKED
  files = (folder / name for name in ("attribution.json", "attribution.html", _ASKED))
  if not all(file.is_file() and file.stat().st_size for file in files):
    return False
  try:
    there = json.loads(asked.read_text(encoding="utf-8"))
  except ValueError:
    return False
  if not isinstance(there, dict):
    return False
  if there != wanted:
    flat = schema.flat(there)
    changed = [name for name, value in schema.flat(wanted).items() if flat.get(name) != value]
    raise ValueError(
      f"{folder} holds an attribution with another {', '.join(changed)}: give another --workdir, or remove it"
    )
  return True


def read_cases(config: ConfigDict) -> list[dict[str, Any]]:
  """The cases of `config.explain`: dicts with context (a text, or a list of records) and question, perhaps with answer
  and part."""
  explain = config.explain
  if explain.context:
    text = _read(explain.context)
    optional = {name: explain[name] for name in ("answer", "part") if explain[name]}
    return [{"context": text, "question": explain.question} | optional]
  try:
    found = json.loads(_read(explain.path))
  except RecursionError:
    raise ValueError(f"{explain.path} is nested too deeply: give an object with context and question") from None
  except json.JSONDecodeError as error:
    hint = "mend it, or give a plain text as --config.explain.context with --config.explain.question"
    raise ValueError(f"{explain.path} is no JSON ({error}): {hint}") from None
  cases = found if isinstance(found, list) else [found]
  for number, case in enumerate(cases):
    _check(case, f"case {number} of {explain.path}")
  if not cases:
    raise ValueError(f"{explain.path} holds no case: give an object with context and question")
  return cases


def _read(path: str) -> str:
  try:
    return pathlib.Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is no UTF-8 text: {error}") from None
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _check(case: Any, where: str) -> None:
  if not isinstance(case, dict):
    raise ValueError(f"{where} is a {type(case).__name__}: give an object with context and question")
  if unknown := sorted(set(case) - {"context", "question", "answer", "part"}):
    raise ValueError(f"{where} has the unknown key {unknown[0]!r}: use context, question, answer and part")
  context = case.get("context")
  records = isinstance(context, list) and all(isinstance(record, str) for record in context)
  if not (isinstance(context, str) or records):
    raise ValueError(f"{where}: context is {context!r}: give a text or a list of texts")
  if not "".join(context or "").strip():
    raise ValueError(f"{where}: context is blank: give some text")
  checks.text(f"{where}: context", "".join(context or ""))
  for name in ("question", "answer", "part"):
    if name == "question" or case.get(name) is not None:
      checks.text(f"{where}: {name}", case.get(name), empty=False)
