"""The benchmarks by the name they have in a configuration, and which of their conversations a split holds."""

import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType

from attrimem_jax import checks
from attrimem_jax.data import locomo, longmemeval, perltqa
from attrimem_jax.types import Episode

# Each has read(path) -> (episodes, report) KINDS, its kinds of questions, and NOTES: whether it has reference notes.
READERS: Mapping[str, ModuleType] = {"locomo": locomo, "longmemeval": longmemeval, "perltqa": perltqa}
SPLITS = ("train", "test", "all")  # without a file of splits


def load(name: str, path: str | pathlib.Path) -> tuple[Sequence[Episode], str]:
  """The episodes of a benchmark and a report for people, from its own file or from a folder of `datasets.prepare`.

  Raises:
    ValueError: there is no such file, or it is not the benchmark's.
  """
  folder = pathlib.Path(os.path.expanduser(path))
  if not os.fspath(path) or not (folder / "dataset_info.json").is_file():
    episodes, report = READERS[name].read(path)
    return episodes, report.text()
  from attrimem_jax.data import datasets  # imports much, which a file does not need

  prepared = datasets.read(folder, name)
  return tuple(prepared), f"{folder}: {len(prepared)} conversations, prepared before"


def holdout(episodes: Sequence[Episode], name: str, count: int) -> tuple[Episode, ...]:
  """All conversations, those for "train", or the last `count` ones, which training never sees, for "test"."""
  if name not in SPLITS:
    raise ValueError(
      f"config.data.holdout makes no split {name!r}: use {', '.join(SPLITS)}, or name config.data.splits."
    )
  if name == "all":
    return tuple(episodes)
  if not 0 < count < len(episodes):
    raise ValueError(
      f"config.data.holdout is {count} of {len(episodes)} conversations: leave at least one on each side."
    )
  return tuple(episodes[-count:] if name == "test" else episodes[:-count])


def read_splits(path: str | pathlib.Path) -> dict[str, tuple[str, ...]]:
  """A JSON object {split: [conversation ids]}, as MemBuilder publishes one for LongMemEval.

  Raises:
    ValueError: it is something else, or an id stands in it twice, so that one split would see another's questions.
  """
  try:
    data = json.loads(pathlib.Path(os.path.expanduser(path)).read_bytes())
  except (OSError, ValueError) as error:
    raise ValueError(f"config.data.splits: {path} is no JSON file that can be read ({error})") from None
  if not isinstance(data, dict) or not data:
    raise ValueError(f"config.data.splits: {path} holds {checks.shown(data)}: write {{split: [conversation ids]}}")
  place: dict[str, str] = {}
  for split, ids in data.items():
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
      raise ValueError(f"config.data.splits: {path}: {split!r} holds {checks.shown(ids)}: write a list of ids")
    for name in ids:
      if name in place:
        raise ValueError(f"config.data.splits: {path}: id {name!r} stands in {place[name]!r} and in {split!r}")
      place[name] = split
  return {split: tuple(ids) for split, ids in data.items()}


def named(episodes: Sequence[Episode], splits: Mapping[str, Iterable[str]], name: str) -> tuple[Episode, ...]:
  """The conversations that split `name` lists, in the order of the data; "all" is all of them, listed or not.

  Raises:
    ValueError: there is no such split, or the data hold none of its conversations.
  """
  if name == "all":
    return tuple(episodes)
  if name not in splits:
    raise ValueError(f"config.data.splits has no split {name!r}: use {', '.join([*splits, 'all'])}")
  wanted = set(splits[name])
  chosen = tuple(episode for episode in episodes if episode.history.id in wanted)
  if not chosen:
    raise ValueError(f"the data hold none of the {len(wanted)} conversations of split {name!r}: check config.data.path")
  return chosen


def overlap(train: Sequence[Episode], test: Sequence[Episode]) -> dict[str, tuple[str, ...]]:
  """What both hold, by what it is: ids of conversations, texts of questions, texts of evidence turns (places in test).

  Distractor sessions are shared by design in LongMemEval; evidence should not be.
  """
  ids = {episode.history.id for episode in train}
  asked = {_folded(question.text) for episode in train for question in episode.questions}
  told = {_folded(text) for episode in train for _, text in _evidence(episode)}
  found = {
    "conversation": (episode.history.id for episode in test if episode.history.id in ids),
    "question": (q.id for episode in test for q in episode.questions if _folded(q.text) in asked),
    "evidence": (
      f"{episode.history.id}:{turn}" for episode in test for turn, text in _evidence(episode) if _folded(text) in told
    ),
  }
  return {what: places for what, some in found.items() if (places := tuple(some))}


def _evidence(episode: Episode) -> list[tuple[str, str]]:
  wanted = {turn for question in episode.questions for turn in question.evidence}
  turns = [turn for session in episode.history.sessions for turn in session.turns]
  return [(turn.id, turn.text) for turn in turns if turn.id in wanted]


def _folded(text: str) -> str:
  return " ".join(text.casefold().split())
