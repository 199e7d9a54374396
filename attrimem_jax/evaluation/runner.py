"""Evaluation: write each history once, ask all its questions, score every one of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from attrimem_jax.evaluation.bootstrap import Interval, difference_interval, mean_interval
from attrimem_jax.memory.actions import Reason
from attrimem_jax.reward.outcome import outcome
from attrimem_jax.rollout.answering import Answer, Reader, ask
from attrimem_jax.rollout.writing import Rollout, Window, Writer, write
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Finish, Question


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
  """One window with the memory that was written of it, its answers and their scores in [0, 1]."""

  rollout: Rollout
  answers: tuple[Answer, ...]
  scores: tuple[float, ...]


def evaluate(
  writer: Writer,
  reader: Reader,
  windows: Sequence[Window],
  questions: Sequence[Sequence[Question]],
  key: jax.Array,
  kind: str,
  chat: Chat | None = None,
  *,
  batch: int = 16,
  show: Callable[[int], None] | None = None,
) -> list[Evaluated]:
  """Writes, asks and scores, `batch` windows at a time.

  Args:
    writer: the policy, at the temperature to evaluate at.
    reader: the answer model.
    windows: what to write.
    questions: what to ask about each window's bank.
    key: of the writer's draws; unused at temperature 0.
    kind: how an answer is scored (`reward.outcome`).
    chat: of the answer model; made if None.
    batch: windows written together.
    show: called with the number of windows done, after each batch.
  """
  done: list[Evaluated] = []
  for at in range(0, len(windows), batch):
    rollouts = [rows[0] for rows in write(writer, windows[at : at + batch], 1, key)]
    done += judge(reader, rollouts, questions[at : at + batch], kind, chat)
    if show is not None:
      show(len(done))
  return done


def judge(
  reader: Reader,
  rollouts: Sequence[Rollout],
  questions: Sequence[Sequence[Question]],
  kind: str,
  chat: Chat | None = None,
) -> list[Evaluated]:
  """Asks and scores the questions of each rollout's bank, whoever wrote it."""
  items = [(r.bank, q, (r.window.history.id, r.index)) for r, q in zip(rollouts, questions, strict=True)]
  return [
    Evaluated(rollout, tuple(answers), tuple(outcome(a.text, a.question, kind) for a in answers))
    for rollout, answers in zip(rollouts, ask(reader, items, chat), strict=True)
  ]


def summarise(done: Sequence[Evaluated], *, samples: int, confidence: float) -> dict[str, Any]:
  """Metrics of an evaluation: accuracy with its interval over conversations, by kind of question, and of the memories.

  `memory_tokens` counts the tokens of current records per history, `rejected` the share of actions that were refused.
  """
  scores = [score for e in done for score in e.scores]
  clusters = [e.rollout.window.history.id for e in done for _ in e.scores]
  interval: Interval = mean_interval(scores, clusters=clusters, samples=samples, confidence=confidence)
  metrics = {"accuracy": interval.mean, "accuracy_low": interval.low, "accuracy_high": interval.high}
  metrics["questions"] = len(scores)
  kinds = [answer.question.kind for e in done for answer in e.answers]
  for kind in sorted(set(kinds)):
    metrics[f"accuracy_{kind}"] = float(np.mean([s for s, k in zip(scores, kinds, strict=True) if k == kind]))
  return metrics | memory_metrics([e.rollout for e in done])


def answer_rows(done: Sequence[Evaluated]) -> list[dict[str, Any]]:
  """One row per question: what was asked, the gold answers, what was answered, and its score."""
  return [
    {
      "history": e.rollout.window.history.id,
      "id": a.question.id,
      "kind": a.question.kind,
      "question": a.question.text,
      "gold": list(a.question.answers),
      "answer": a.text,
      "score": float(score),
    }
    for e in done
    for a, score in zip(e.answers, e.scores, strict=True)
  ]


def gain(
  after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], *, samples: int, confidence: float
) -> dict[str, float]:
  """By how much the same questions are answered better, with the interval of the paired difference over conversations.

  Args:
    after, before: rows of `answer_rows`. Nothing is returned where they are not of the same questions.
    samples, confidence: of the bootstrap.
  """
  keys = [[(row["history"], row["id"], row["question"]) for row in rows] for rows in (after, before)]
  if keys[0] != keys[1]:
    return {}
  scores = [[row["score"] for row in rows] for rows in (after, before)]
  clusters = [history for history, *_ in keys[0]]
  found = difference_interval(*scores, clusters=clusters, samples=samples, confidence=confidence)
  return {"gain": found.mean, "gain_low": found.low, "gain_high": found.high}


def memory_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
  """Size of the memories and fate of the actions, averaged over rollouts."""
  calls = [call for r in rollouts for call in r.calls]
  refused = [action.reason != Reason.OK for call in calls for action in call.actions]
  metrics = {
    "memory_tokens": float(np.mean([sum(len(record.ids) for record in r.bank.current()) for r in rollouts])),
    "records": float(np.mean([len(r.bank.current()) for r in rollouts])),
    "rejected": float(np.mean(refused)) if refused else 0.0,
  }
  if calls:
    metrics["completion_tokens"] = float(np.mean([len(call.completion.ids) for call in calls]))
    metrics["unfinished"] = float(np.mean([call.completion.finish == Finish.LENGTH for call in calls]))
  return metrics
