"""Benchmarks as TFDS data sets: one example per conversation, array_record files, no TensorFlow.

A benchmark that was prepared once is read without parsing it again, conversation by conversation and in any order, so
that many processes each read their own.

  python -m attrimem_jax.data.datasets longmemeval longmemeval_s_cleaned.json prepared

`read` gives back the episodes exactly as the benchmark's own reader made them. TFDS stores lists of objects, but no
lists within them: turns carry the number of their session, answers and evidence are JSON.
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from attrimem_jax.data import benchmarks
from attrimem_jax.types import Episode, History, Module, Note, Question, Session, Turn

SPLIT = "conversations"


@dataclasses.dataclass
class Benchmark(tfds.core.BuilderConfig):
  """Which reader reads which file."""

  path: str = ""


class Conversations(tfds.core.GeneratorBasedBuilder):
  """Conversations of a benchmark with their questions, in the order of its file, as the split "conversations"."""

  VERSION = tfds.core.Version("1.0.0")

  def _info(self) -> tfds.core.DatasetInfo:
    text, number = tfds.features.Text(), np.int32
    features = {
      "id": text,
      "sessions": tfds.features.Sequence({"id": text, "date": text}),
      "turns": tfds.features.Sequence({"session": number, "speaker": text, "text": text, "id": text}),
      "questions": tfds.features.Sequence(dict.fromkeys(("id", "text", "answers", "kind", "evidence", "date"), text)),
      "notes": tfds.features.Sequence({"session": number, "module": text, "text": text}),
    }
    described = {"description": self.__doc__, "features": tfds.features.FeaturesDict(features)}
    return tfds.core.DatasetInfo(builder=self, disable_shuffling=True, **described)

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
    return {SPLIT: self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
    episodes, _ = benchmarks.READERS[self.builder_config.name].read(self.builder_config.path)
    yield from ((number, to_example(episode)) for number, episode in enumerate(episodes))


def prepare(name: str, path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> pathlib.Path:
  """Writes the benchmark `name`, read from `path`, below `folder`, and returns where: what `read` takes.

  Raises:
    ValueError: there is no such benchmark, or its reader refuses the file.
  """
  if name not in benchmarks.READERS:
    raise ValueError(f"there is no benchmark {name!r}: use {', '.join(benchmarks.READERS)}")
  episodes, _ = benchmarks.READERS[name].read(path)  # a file that is wrong is refused before anything is written
  builder = Conversations(config=Benchmark(name=name, path=os.fspath(path)), data_dir=os.fspath(folder))
  try:
    builder.download_and_prepare(file_format="array_record")
  except OSError as error:
    raise ValueError(f"nothing can be written below {folder} ({error}): give another folder") from None
  written = builder.info.splits[SPLIT].num_examples
  if written != len(episodes):
    raise ValueError(f"{builder.data_path} holds {written} conversations of an earlier file: remove it, then prepare")
  return pathlib.Path(builder.data_path)


def read(folder: str | os.PathLike[str], name: str = "") -> Sequence[Episode]:
  """The episodes below a folder that `prepare` returned, each read when it is asked for.

  Args:
    folder: of the data set.
    name: of the benchmark that it must be of; "" takes any.

  Raises:
    ValueError: there is no such data set, or it is of another benchmark.
  """
  try:
    builder = tfds.builder_from_directory(os.fspath(folder))
    source = builder.as_data_source(split=SPLIT)
  except Exception as error:  # TFDS raises what it meets: of files, JSON, protocol buffers
    raise ValueError(f"{folder} holds no conversations that were prepared here: {error}") from None
  found = builder.info.config_name
  if name and found != name:
    raise ValueError(
      f"{folder} was prepared from {found}, not from {name}: correct config.data.path or config.data.name"
    )
  return _Episodes(source)


class _Episodes(Sequence[Episode]):
  def __init__(self, source: Sequence[Mapping[str, Any]]):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    place = range(len(self))[index]
    try:
      return from_example(self._source[place])
    except RuntimeError as error:  # of array_record
      raise ValueError(f"conversation {place} cannot be read ({error}): prepare the data set again") from None


def to_example(episode: Episode) -> dict[str, Any]:
  """The features of an episode."""
  history = episode.history
  return {
    "id": history.id,
    "sessions": [{"id": session.id, "date": session.date} for session in history.sessions],
    "turns": [
      {"session": number} | dataclasses.asdict(turn)
      for number, session in enumerate(history.sessions)
      for turn in session.turns
    ],
    "questions": [
      dataclasses.asdict(q) | {"answers": json.dumps(q.answers), "evidence": json.dumps(q.evidence)}
      for q in episode.questions
    ],
    "notes": [dataclasses.asdict(note) | {"module": str(note.module)} for note in episode.notes],
  }


def from_example(example: Mapping[str, Any]) -> Episode:
  """The inverse of `to_example`, of bytes and columns as TFDS reads them."""
  turns: dict[int, list[Turn]] = {}
  for row in _rows(example["turns"]):
    turns.setdefault(row.pop("session"), []).append(Turn(**row))
  sessions = [
    Session(turns=tuple(turns.get(number, ())), **row) for number, row in enumerate(_rows(example["sessions"]))
  ]
  questions = [
    Question(**row | {name: tuple(json.loads(row[name])) for name in ("answers", "evidence")})
    for row in _rows(example["questions"])
  ]
  notes = [Note(**row | {"module": Module(row["module"])}) for row in _rows(example["notes"])]
  return Episode(History(_plain(example["id"]), tuple(sessions)), tuple(questions), tuple(notes))


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
  for values in zip(*columns.values(), strict=True):
    yield dict(zip(columns, map(_plain, values), strict=True))


def _plain(value: Any) -> Any:
  return value.decode() if isinstance(value, bytes) else int(value)


if __name__ == "__main__":
  if len(sys.argv) != 4:
    sys.exit(f"usage: python -m attrimem_jax.data.datasets {{{','.join(benchmarks.READERS)}}} FILE FOLDER")
  try:
    print(prepare(*sys.argv[1:]))
  except ValueError as error:
    sys.exit(f"error: {error}")
