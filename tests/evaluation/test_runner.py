import types

import numpy as np
import pytest

from attrimem_jax.evaluation.runner import Evaluated, gain, memory_metrics, summarise
from attrimem_jax.memory.actions import Reason
from attrimem_jax.memory.bank import Bank
from attrimem_jax.rollout.writing import Rollout, Window
from attrimem_jax.types import Finish, History, Module, Question, Record, Session


def _evaluated(name, scores, kinds, bank=None, calls=()):
  window = Window(History(name, (Session("s", "2024-01-01", ()),)), 0, 0, 1)
  answers = tuple(types.SimpleNamespace(question=Question("q", "?", ("a",), kind)) for kind in kinds)
  return Evaluated(Rollout(window, 0, calls, bank or Bank.empty()), answers, tuple(scores))


def test_accuracy_counts_every_question_once_and_by_kind():
  done = [_evaluated("a", [1.0, 0.0, 1.0], ["x", "x", "y"]), _evaluated("b", [0.0], ["y"])]
  metrics = summarise(done, samples=200, confidence=0.9)
  assert metrics["accuracy"] == pytest.approx(0.5)
  assert metrics["accuracy_x"] == pytest.approx(0.5)
  assert metrics["accuracy_y"] == pytest.approx(0.5)
  assert metrics["questions"] == 4
  assert metrics["accuracy_low"] <= 0.5 <= metrics["accuracy_high"]


def test_the_interval_resamples_conversations_not_questions():
  alike = [_evaluated(str(i), [float(i % 2)] * 20, ["x"] * 20) for i in range(10)]
  apart = [_evaluated(str(i), [float(i % 2)], ["x"]) for i in range(200)]
  wide, narrow = (summarise(done, samples=500, confidence=0.95) for done in (alike, apart))
  spread = [m["accuracy_high"] - m["accuracy_low"] for m in (wide, narrow)]
  assert spread[0] > 2 * spread[1]


def test_memory_metrics_count_current_records_and_refused_actions():
  records = (
    Record(1, Module.CORE, "a", (1, 2, 3), current=False),
    Record(2, Module.CORE, "b", (4, 5), supersedes=(1,)),
    Record(3, Module.SEMANTIC, "c", (6,)),
  )
  completion = types.SimpleNamespace(ids=np.arange(4), finish=Finish.LENGTH)
  actions = (types.SimpleNamespace(reason=Reason.OK), types.SimpleNamespace(reason=Reason.DUPLICATE))
  calls = (types.SimpleNamespace(completion=completion, actions=actions),)
  metrics = memory_metrics([_evaluated("a", [], [], Bank(records, 4), calls).rollout])
  assert metrics == {
    "memory_tokens": 3,
    "records": 2,
    "rejected": 0.5,
    "completion_tokens": 4,
    "unfinished": 1,
  }


def test_a_given_memory_has_no_calls_to_count():
  metrics = memory_metrics([_evaluated("a", [], []).rollout])
  assert metrics == {"memory_tokens": 0, "records": 0, "rejected": 0}


def test_gain_pairs_the_questions_and_resamples_whole_conversations():
  """Two conversations of two questions: one gains everything, one nothing, so a resampled gain is 0, 1/2 or 1."""
  before = [{"history": h, "id": str(i), "question": "?", "score": 0.0} for h in "ab" for i in range(2)]
  after = [row | {"score": float(row["history"] == "a")} for row in before]
  assert gain(after, before, samples=400, confidence=0.95) == {"gain": 0.5, "gain_low": 0.0, "gain_high": 1.0}
  assert gain(before, before, samples=10, confidence=0.95) == {"gain": 0.0, "gain_low": 0.0, "gain_high": 0.0}
  assert gain(after[:3], before, samples=10, confidence=0.95) == {}
  assert gain(after[::-1], before, samples=10, confidence=0.95) == {}
