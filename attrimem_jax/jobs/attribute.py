"""Explains answers by the texts that they were given from: job `attribute`."""

import json
import pathlib
from typing import Any

from ml_collections import ConfigDict

from attrimem_jax.explain import attribute
from attrimem_jax.io import models
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run


def run_attribute(config: ConfigDict, run: Run) -> None:
  """Writes attribution.json and attribution.html for every case: to the run directory, or to folders 000, 001, … of it.

  A case whose JSON file exists already is left alone, so that a run that was stopped goes on.

  Raises:
    ValueError: the file of cases is malformed, or a case cannot be explained; it says which.
  """
  cases = read_cases(config)
  model = models.load(config.answer.model)
  for number, case in enumerate(cases):
    folder = run.workdir if len(cases) == 1 else run.workdir / f"{number:03d}"
    if (folder / "attribution.json").exists():
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
        masks=config.explain.masks,
        scorer=config.attribution.scorer,
        penalty=config.attribution.penalty,
        alpha=config.attribution.alpha,
        keep=config.attribution.keep,
        held_out=config.explain.held_out,
        max_new_tokens=config.answer.max_new_tokens,
        seed=config.seed,
        dtype=config.answer.dtype,
      )
    except ValueError as error:
      raise ValueError(f"case {number} ({case['question']!r}): {error}") from error
    page = found.save(folder)
    print(f"{number + 1}/{len(cases)}  {found!r}\n{page}", flush=True)
    if run.stopping:
      return


def read_cases(config: ConfigDict) -> list[dict[str, Any]]:
  """The cases of `config.explain`: dicts with context (a text, or a list of records), question and perhaps answer."""
  explain = config.explain
  if explain.context:
    text = _read(explain.context)
    return [{"context": text, "question": explain.question} | ({"answer": explain.answer} if explain.answer else {})]
  try:
    found = json.loads(_read(explain.path))
  except json.JSONDecodeError as error:
    raise ValueError(f"{explain.path} is no JSON: {error}") from None
  cases = found if isinstance(found, list) else [found]
  for number, case in enumerate(cases):
    _check(case, f"case {number} of {explain.path}")
  if not cases:
    raise ValueError(f"{explain.path} holds no case: give an object with context and question")
  return cases


def _read(path: str) -> str:
  try:
    return pathlib.Path(path).expanduser().read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} is no UTF-8 text: {error}") from None


def _check(case: Any, where: str) -> None:
  if not isinstance(case, dict):
    raise ValueError(f"{where} is a {type(case).__name__}: give an object with context and question")
  context = case.get("context")
  records = isinstance(context, list) and all(isinstance(record, str) for record in context)
  if not (isinstance(context, str) or records):
    raise ValueError(f"{where}: context is {context!r}: give a text or a list of texts")
  for name in ("question", "answer"):
    if not isinstance(case.get(name, "" if name == "answer" else None), str):
      raise ValueError(f"{where}: {name} is {case.get(name)!r}: give a text")
