"""Evaluation: write each history once, ask all its questions, score every one of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attrimem_jax.evaluation.bootstrap import Interval, mean_interval
from attrimem_jax.memory.actions import Reason
from attrimem_jax.reward.outcome import outcome
from attrimem_jax.rollout.answering import Answer, Reader, ask
from attrimem_jax.rollout.writing import Rollout, Window, Writer, write
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Question


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
  *,
  batch: int = 16,
) -> list[Evaluated]:
  """Writes, asks and scores, `batch` windows at a time.

  Args:
    writer: the policy, at the temperature to evaluate at.
    reader: the answer model.
    windows: what to write.
    questions: what to ask about each window's bank.
    key: of the writer's draws; unused at temperature 0.
    kind: how an answer is scored (`reward.outcome`).
    batch: windows written together.
  """
  chat = writer.chat or Chat(writer.model.tokenizer)
  done = []
  for at in range(0, len(windows), batch):
    rollouts = [rows[0] for rows in write(writer, windows[at : at + batch], 1, key)]
    asked = questions[at : at + batch]
    answers = ask(reader, [(r.bank, q, (r.window.history.id, 0)) for r, q in zip(rollouts, asked, strict=True)], chat)
    for rollout, group in zip(rollouts, answers, strict=True):
      scores = tuple(outcome(answer.text, answer.question, kind) for answer in group)
      done.append(Evaluated(rollout, tuple(group), scores))
  return done


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


def memory_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
  """Size of the memories and fate of the actions, averaged over rollouts."""
  actions = [action for r in rollouts for call in r.calls for action in call.actions]
  calls = [call for r in rollouts for call in r.calls]
  return {
    "memory_tokens": float(np.mean([sum(len(x.ids) for x in r.bank.current()) for r in rollouts])),
    "records": float(np.mean([len(r.bank.current()) for r in rollouts])),
    "rejected": float(np.mean([a.reason != Reason.OK for a in actions])) if actions else 0.0,
    "completion_tokens": float(np.mean([len(call.completion.ids) for call in calls])),
    "unfinished": float(np.mean([call.completion.finish == "length" for call in calls])),
  }
