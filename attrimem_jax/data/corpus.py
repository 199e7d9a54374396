"""Every kind of text that models of the synthetic world read or write: what their tokenizer learns from."""

from collections.abc import Iterator

import numpy as np

from attrimem_jax.data import answering, synthetic, teacher
from attrimem_jax.types import Episode, Module, Record

_CARELESS = teacher.Sloppiness(miss=0.1, chatter=0.3, blur=0.2)
_ROLES = "user\nassistant\nsystem\n"


class _Held:
  """A bank that holds given records."""

  def __init__(self, records: tuple[Record, ...]):
    self._records = records

  def current(self, module: Module | None = None) -> tuple[Record, ...]:
    return tuple(record for record in self._records if module in (None, record.module))


def texts(episodes: int, seed: int = 0) -> Iterator[str]:
  """Yields the texts of the first `episodes` episodes of the train split, in the layout of the compact prompts."""
  rng = np.random.default_rng(seed)
  for index in range(episodes):
    episode = synthetic.episode(synthetic.WorldConfig(), "train", seed, index)
    yield from _writing(rng, episode)
    yield from _answering(rng, episode)
    yield _ROLES


def _writing(rng: np.random.Generator, episode: Episode) -> Iterator[str]:
  records = _numbered(rng, episode)
  for number, session in enumerate(episode.history.sessions):
    lines = "".join(f"{turn.speaker}: {turn.text}\n" for turn in session.turns)
    yield f"{session.date}\n{lines}"
    for module in Module:
      held = _Held(tuple(r for r in records if r.date < session.date))
      yield f"{module}:\n" + "".join(f"#{r.id} {r.text}\n" for r in held.current(module))
      yield teacher.teacher_actions(episode, number, module, held, sloppiness=_CARELESS, rng=rng)


def _numbered(rng: np.random.Generator, episode: Episode) -> tuple[Record, ...]:
  first = int(rng.integers(1, 60))
  gold = teacher.gold_records(episode, keep_old=True)  # old versions, so that there is something to update
  return tuple(Record(first + i, module, text, (), date) for i, (module, text, date) in enumerate(gold))


def _answering(rng: np.random.Generator, episode: Episode) -> Iterator[str]:
  records, asked = answering.answer_example(rng, episode)
  yield "".join(f"[{date}] {text}\n" for text, date in records)
  for question, target in asked:
    yield f"{question.date} {question.text}"
    yield target
