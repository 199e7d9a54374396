"""Answers in the format that each benchmark's own scripts read, written and read back.

LongMemEval: a JSON object a line, {question_id, hypothesis}. LoCoMo: the list of conversations, {sample_id, qa}, where
each question of the data file carries `<name>_prediction`. PerLTQA publishes no such format: lines {id, prediction}.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrimem_jax import checks
from attrimem_jax.types import Episode

_KEYS = {"longmemeval": ("question_id", "hypothesis")}
_SUFFIX = "_prediction"


def write(
  folder: pathlib.Path, name: str, data: str, episodes: Sequence[Episode], answers: Mapping[str, str], label: str
) -> pathlib.Path:
  """Writes submission.json or submission.jsonl; questions without an answer are left out (LoCoMo: have no prediction).

  Args:
    folder: where.
    name: of the benchmark.
    data: its file; LoCoMo's submission repeats the questions as they stand there.
    episodes: what was asked.
    answers: by question id.
    label: names the predictions in LoCoMo's file.
  """
  if name == "locomo":
    path = folder / "submission.json"
    content = _locomo(data, episodes, answers, f"{label}{_SUFFIX}")
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return path
  key, value = _KEYS.get(name, ("id", "prediction"))
  path = folder / "submission.jsonl"
  asked = [question.id for episode in episodes for question in episode.questions if question.id in answers]
  lines = [json.dumps({key: i, value: answers[i]}) for i in asked]
  path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
  return path


def read(path: str | pathlib.Path, name: str, episodes: Sequence[Episode]) -> dict[str, str]:
  """Answers by question id, of a file that `write` or the benchmark's own scripts wrote.

  Raises:
    ValueError: it is no such file, answers a question twice, or one that the data do not hold; the message names the
      place.
  """
  file = pathlib.Path(os.path.expanduser(path))
  known = {question.id for episode in episodes for question in episode.questions}
  found: dict[str, str] = {}
  for where, key, answer in (
    _predictions(file) if name == "locomo" else _lines(file, *_KEYS.get(name, ("id", "prediction")))
  ):
    if not isinstance(key, str) or key not in known:
      raise ValueError(f"{where}: {checks.shown(key)} is no question of the data: remove it, or give those data")
    if key in found:
      raise ValueError(f"{where}: {key!r} is answered twice: keep one of the two")
    if not isinstance(answer, str):
      raise ValueError(f"{where}: the answer is {checks.shown(answer)}: write a text, or leave the question out")
    found[key] = answer
  return found


def _locomo(data: str, episodes: Sequence[Episode], answers: Mapping[str, str], key: str) -> list[dict[str, Any]]:
  wanted = {episode.history.id for episode in episodes}
  items = json.loads(pathlib.Path(os.path.expanduser(data)).read_bytes())
  return [
    {
      "sample_id": item["sample_id"],
      "qa": [_predicted(qa, answers.get(f"{item['sample_id']}:q{i}"), key) for i, qa in enumerate(item["qa"])],
    }
    for item in items
    if item["sample_id"] in wanted
  ]


def _predicted(question: dict[str, Any], answer: str | None, key: str) -> dict[str, Any]:
  return question if answer is None else question | {key: answer}


def _predictions(file: pathlib.Path) -> Iterator[tuple[str, Any, Any]]:
  items = _json(file.read_bytes(), str(file))
  for c, item in enumerate(_list(items, str(file))):
    where = f"{file}[{c}]"
    if not isinstance(item, dict) or not isinstance(item.get("sample_id"), str):
      raise ValueError(f"{where}: {checks.shown(item)} has no sample_id: give LoCoMo's own file of predictions")
    for i, question in enumerate(_list(item.get("qa"), f"{where}.qa")):
      keys = [k for k in question if k.endswith(_SUFFIX)] if isinstance(question, dict) else []
      if len(keys) > 1:
        raise ValueError(f"{where}.qa[{i}]: holds predictions {', '.join(keys)}: keep those of one system")
      if keys:
        yield f"{where}.qa[{i}].{keys[0]}", f"{item['sample_id']}:q{i}", question[keys[0]]


def _lines(file: pathlib.Path, key: str, value: str) -> Iterator[tuple[str, Any, Any]]:
  content = file.read_bytes()
  lists = content.lstrip().startswith(b"[")
  items = _list(_json(content, str(file)), str(file)) if lists else content.splitlines()
  for number, item in enumerate(items, 1):
    where = f"{file}:{number}"
    if isinstance(item, bytes):
      if not item.strip():
        continue
      item = _json(item, where)
    if not isinstance(item, dict) or key not in item or value not in item:
      raise ValueError(f"{where}: {checks.shown(item)} is not an object with {key} and {value}")
    yield where, item[key], item[value]


def _json(text: bytes, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{where}: broken or cut JSON ({error})") from None


def _list(value: Any, where: str) -> list[Any]:
  if not isinstance(value, list):
    raise ValueError(f"{where}: {checks.shown(value)} is no list")
  return value
