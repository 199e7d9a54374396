"""Judged scores with a scripted judge: the unjudged is in no mean, the missing is wrong, planted errors count."""

import json
import math

import pytest

from attrimem_jax.evaluation.judging import calibrate, calibration_set, judged
from attrimem_jax.types import Episode, History, Question

CORRECT, WRONG = '{"verdict": "correct"}', '{"verdict": "wrong"}'
QUESTIONS = tuple(
  Question(f"q{i}", f"What is {i}?", (gold,), "single-hop") for i, gold in enumerate(("Oslo", "12 cats"))
)
EPISODES = (Episode(History("a", ()), QUESTIONS), Episode(History("b", ()), (Question("c_abs", "And?", (), "x"),)))


def _texts(messages):
  return json.loads(messages[1][1].rpartition("\n\n")[0])


def test_unjudged_is_in_no_mean_and_missing_is_wrong():
  def complete(prompts):
    return [{"Oslo": CORRECT, "dunno": "maybe"}[_texts(p)["answer"]] for p in prompts]

  found = judged(EPISODES, {"q0": "Oslo", "c_abs": "dunno"}, complete)
  assert found.score.overall.mean == 0.5  # q0 right, q1 missing, c_abs unjudged
  assert (found.unjudged, found.missing, found.comparable) == (("c_abs",), ("q1",), False)
  assert found.verdicts == {"q0": True, "q1": False}


def test_a_judge_without_a_verdict_is_asked_again_for_those_alone():
  seen = []

  def complete(prompts):
    seen.append(len(prompts))
    return [CORRECT if len(seen) > 1 or i else None for i in range(len(prompts))]

  found = judged(EPISODES, {"q0": "a", "q1": "b", "c_abs": "c"}, complete)
  assert seen == [3, 1]
  assert found.score.overall.mean == 1
  assert not found.unjudged


def test_exclusions_need_a_known_id_and_a_source():
  found = judged(EPISODES, {"q0": "x"}, lambda p: [CORRECT] * len(p), exclude={"q1": "audit 2", "c_abs": "audit 2"})
  assert found.score.overall.mean == 1
  assert found.missing == ()
  for exclude in ({"q9": "audit"}, {"q1": " "}):
    with pytest.raises(ValueError, match="excluded question"):
      judged(EPISODES, {}, lambda p: [], exclude=exclude)


def test_nothing_judged_has_no_accuracy():
  found = judged(EPISODES[1:], {"c_abs": "x"}, lambda p: ["?"] * len(p))
  assert math.isnan(found.score.overall.mean)
  assert found.unjudged == ("c_abs",)


def test_planted_errors_are_of_the_same_kind_and_turn_yes_into_no():
  golds = {"a": ("Yes.", "x"), "b": ("Oslo", "x"), "c": ("tea", "y"), "d": ("Rome.", "x")}
  questions = [Question(name, f"What is {name}?", (gold,), kind) for name, (gold, kind) in golds.items()]
  for seed in range(8):
    wrong = {q.id: answer for q, answer, right in calibration_set(questions, 4, seed) if not right}
    assert wrong["a"] == "I think it was No."
    assert wrong["b"] in ("I think it was Rome.", "I think it was Yes.")
    assert wrong["c"] != "I think it was tea."


def test_calibration_tells_a_careful_judge_from_one_that_accepts_all():
  rows = calibration_set([q for e in EPISODES for q in e.questions], 3)
  assert sum(label for *_, label in rows) == len(rows) / 2 == 3
  wrong = {q.id: answer for q, answer, label in rows if not label}
  assert "19 cats" in wrong["q1"]
  assert "12" not in wrong["q1"]
  assert "Oslo" not in wrong["q0"]
  labels = {(q.text, answer): label for q, answer, label in rows}

  def careful(prompts):
    return [CORRECT if labels[_texts(p)["question"], _texts(p)["answer"]] else WRONG for p in prompts]

  best, lax = calibrate(careful, rows), calibrate(lambda p: [CORRECT] * len(p), rows)
  assert (best.recall, best.specificity, best.unjudged) == (1, 1, 0)
  assert (lax.recall, lax.specificity) == (1, 0)
  assert calibrate(lambda p: ["?"] * len(p), rows).unjudged == 6
