"""What is written and what is asked at each step: pure functions of the configuration and the step's number.

Step n always gets the same histories, windows and questions, whatever ran before it, so a run can stop and go on.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from attrimem_jax.data import benchmarks, synthetic
from attrimem_jax.jobs import setup
from attrimem_jax.memory import bank as banks
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import Overflow, Prompts, fit_history
from attrimem_jax.rollout.writing import Window
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Episode, History, Note, Question


@dataclasses.dataclass(frozen=True)
class Task:
  """A window of an episode to write, and the questions to ask afterwards; the writer is given the window alone."""

  window: Window
  questions: tuple[Question, ...]
  episode: Episode


class Tasks:
  """The training and evaluation tasks of one run.

  Args:
    config: the run's configuration.
    chat: of the policy; long sessions are fitted to its tokens.
    prompts: of the policy.

  Raises:
    ValueError: the data do not exist, are malformed, or leave nothing to ask.
  """

  def __init__(self, config: ConfigDict, chat: Chat, prompts: Prompts):
    self._config, self._chat, self._prompts = config, chat, prompts
    self._world = setup.world(config)
    self.report = ""
    self._finite: dict[str, tuple[Episode, ...]] = {}
    self._made: dict[tuple[str, int], Episode] = {}
    if config.data.name in benchmarks.READERS:
      episodes, self.report = benchmarks.load(config.data.name, config.data.path)
      table = benchmarks.read_splits(config.data.splits) if config.data.splits else None
      for split in {config.data.split, config.eval.split}:
        self._finite[split] = (
          benchmarks.holdout(episodes, split, config.data.holdout)
          if table is None
          else benchmarks.named(episodes, table, split)
        )
      self.report += self._shared()
    self._require_questions()

  def _shared(self) -> str:
    """A line on what training and evaluation have in common, if they should not."""
    config = self._config
    if config.job != "train" or config.data.split == config.eval.split:
      return ""
    found = benchmarks.overlap(self._finite[config.data.split], self._finite[config.eval.split])
    return "".join(
      f"\n  {len(places):4d}  {what} of split {config.eval.split!r} that split {config.data.split!r} holds too: "
      f"{', '.join(places[:5])}"
      for what, places in found.items()
    )

  def _require_questions(self) -> None:
    """Looks at all conversations of each split, or the first 64 where there is no end of them."""
    config = self._config
    splits = [("eval", config.eval.split, config.data.kinds)]
    if config.job == "train":
      splits.append(("data", config.data.split, config.reward.kinds or config.data.kinds))
    for part, split, of in splits:
      some = self._finite[split] if split in self._finite else [self._episode(split, i) for i in range(64)]
      if not any(of_kinds(episode.questions, of) for episode in some):
        kinds = f" of the kinds {', '.join(of)}" if of else ""
        raise ValueError(
          f"the conversations of config.{part}.split={split!r} hold no question{kinds}: change config.data.kinds, or "
          "use other data"
        )

  def training(self, step: int, draw: int = 0) -> list[Task]:
    """The `rollout.histories` tasks of one step; each `draw`, from 0 to 3, has its own.

    Runs of other seeds read other histories of the synthetic world.
    """
    config = self._config
    count = config.rollout.histories
    endless = config.data.split not in self._finite
    first = draw * 2**30 + step * count + (config.seed % 2**10 * 2**20 if endless else 0)  # below 2**32, as keys are
    kinds, questions = config.reward.kinds or config.data.kinds, config.reward.questions
    return [
      self._task(config.data.split, first + i, (1, step, i, draw)[: 4 if draw else 3], questions, kinds)
      for i in range(count)
    ]

  def evaluation(self) -> list[Task]:
    """The `eval.episodes` tasks that every evaluation of this run uses, with all their questions."""
    config = self._config
    count, kinds, questions = self._available(config.eval), config.data.kinds, config.eval.questions
    return [self._task(config.eval.split, i, (2, i), questions, kinds) for i in range(count)]

  def histories(self, split: str, count: int) -> list[History]:
    """The first `count` conversations of a split, or all that there are, in an order drawn from the seed."""
    finite = self._finite.get(split)
    return [self._episode(split, i).history for i in range(count if finite is None else min(count, len(finite)))]

  def _available(self, evaluation: ConfigDict) -> int:
    finite = self._finite.get(evaluation.split)
    return evaluation.episodes if finite is None else min(evaluation.episodes, len(finite))

  def _task(self, split: str, number: int, path: tuple[int, ...], questions: int, kinds: Sequence[str]) -> Task:
    """Task `number` of a split; `path` makes its window and the choice of its questions random but repeatable."""
    rng = np.random.default_rng(np.random.SeedSequence([self._config.seed, *path]))
    episode = self._episode(split, number)
    window = _window(self._config, self._chat, episode, number, rng)
    asked = of_kinds(askable(episode, window), kinds)
    if not asked:  # a window of small talk; ask about it anyway would only add noise
      return Task(window, (), episode)
    if 0 < questions < len(asked):
      asked = [asked[i] for i in sorted(rng.choice(len(asked), questions, replace=False))]
    return Task(window, tuple(asked), episode)

  def _episode(self, split: str, number: int) -> Episode:
    if split in self._finite:
      episodes = self._finite[split]
      epoch, place = divmod(number, len(episodes))
      order = np.random.default_rng(np.random.SeedSequence([self._config.seed, 3, epoch])).permutation(len(episodes))
      return self._fit(split, int(order[place]))
    return synthetic.episode(self._world, split, self._config.data.seed, number)

  def _fit(self, split: str, place: int) -> Episode:
    """Made when first asked for: a haystack takes a second to tokenise, and a run may need few of them."""
    if (split, place) not in self._made:
      self._made[split, place] = self._fitted(self._finite[split][place])
    return self._made[split, place]

  def _fitted(self, episode: Episode) -> Episode:
    """Leaves out or divides what would not fit the prompt. Notes of a divided session belong to its last part: a bank
    of reference notes never holds what was not read yet."""
    config = self._config.policy
    budget, overflow = config.max_prompt // 2, Overflow(config.overlong)
    history, origin = fit_history(self._chat, self._prompts, episode.history, budget, overflow)
    last = {session: place for place, session in enumerate(origin)}
    notes = tuple(Note(last[note.session], note.module, note.text) for note in episode.notes)
    return dataclasses.replace(episode, history=history, notes=notes)


def of_kinds(questions: Sequence[Question], kinds: Sequence[str]) -> list[Question]:
  """The questions of the given kinds; of every kind where none is given."""
  return [question for question in questions if not kinds or question.kind in kinds]


def askable(episode: Episode, window: Window) -> list[Question]:
  """The questions that the sessions up to the window's end answer, with some evidence inside the window.

  Questions without evidence in the data (most are to be abstained from) are asked when the window ends the history;
  those whose evidence was cut off, never.
  """
  session_of = {turn.id: s for s, session in enumerate(episode.history.sessions) for turn in session.turns}
  last = window.stop == len(episode.history.sessions)
  chosen = []
  for question in episode.questions:
    places = [session_of.get(turn, -1) for turn in question.evidence]
    inside = bool(places) and min(places) >= 0 and window.start <= max(places) < window.stop
    if inside or (not places and last):
      chosen.append(question)
  return chosen


def _window(config: ConfigDict, chat: Chat, episode: Episode, number: int, rng: np.random.Generator) -> Window:
  history, horizon = episode.history, config.rollout.horizon
  total = len(history.sessions)
  count = min(horizon.sessions or total, total)
  start = int(rng.integers(total - count + 1))
  bank = _given_bank(history, episode.notes, start, chat) if horizon.bank == "reference" else Bank.empty()
  return Window(history, number, start, start + count, bank)


def _given_bank(history: History, notes: Sequence[Note], start: int, chat: Chat) -> Bank:
  earlier = [note for note in notes if note.session < start]
  return banks.from_notes(earlier, [session.date for session in history.sessions], chat.tokenizer)
