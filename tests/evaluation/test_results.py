"""Files of conversations and submissions: read back as written; broken ones are refused with file and field."""

import copy
import json
import random

import pytest

from attrimem_jax.evaluation import submissions
from attrimem_jax.evaluation.results import costs, paired, read_conversation, summarise
from attrimem_jax.types import Episode, History, Question
from attrimem_jax.view.benchmark import comparison, pareto

EPISODE = Episode(
  History("h", ()), (Question("h:q0", "Who?", ("Tom",), "x"), Question("h:q1", "Where?", ("Rome",), "y"))
)
GOOD = {
  "history": "h", "fingerprint": "f", "system": "rag", "whole": False, "answer_model": "m",
  "cost": {"calls": 2, "read": 90, "written": 10}, "seconds": {"write": 1.0, "retrieve": 0.5, "answer": 2.5},
  "passages": [["Tom", "2024-01-01", 0], ["Rome", "", 1]], "retrieved": [[1, 0], []],
  "answers": [
    {"id": "h:q0", "answer": "Tom", "read": 40, "written": 5, "left_out": 3},
    {"id": "h:q1", "answer": None, "read": 50, "written": 5, "left_out": 0},
  ],
}  # fmt: skip


def _write(tmp_path, content):
  path = tmp_path / "00000.json"
  path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
  return path


def test_what_was_written_comes_back_with_its_costs(tmp_path):
  found = read_conversation(_write(tmp_path, GOOD), EPISODE, "f")
  assert [[p.text for p in passages] for passages in found.retrieved()] == [["Rome", "Tom"], []]
  total = costs([found])
  assert total["tokens_per_question"] == (100 + 90 + 10) / 2  # writing is shared by both questions
  assert total["seconds_per_question"] == 1.5
  summary = summarise([EPISODE], {"h:q0": "Tom"}, [found], "locomo_like", samples=50, confidence=0.95)
  assert summary["missing"] == ["h:q1"]
  assert summary["measures"]["exact"]["overall"][0] == 0.5


@pytest.mark.parametrize(
  ("change", "field"),
  [
    (lambda c: c.pop("passages"), "passages"),
    (lambda c: c.update(fingerprint="other"), "fingerprint"),
    (lambda c: c["answers"].reverse(), "answers"),
    (lambda c: c["answers"][0].update(answer=5), r"answers\[0\].answer"),
    (lambda c: c["answers"][1].update(read=-1), r"answers\[1\].read"),
    (lambda c: c["retrieved"][0].append(2), r"retrieved\[0\]"),
    (lambda c: c["retrieved"].append([]), "retrieved"),
    (lambda c: c["passages"][0].pop(), r"passages\[0\]"),
    (lambda c: c["cost"].update(calls=True), "cost.calls"),
    (lambda c: c["seconds"].update(write=float("nan")), "seconds.write"),
    (lambda c: c.update(whole=1), "whole"),
  ],
)
def test_a_broken_file_names_its_field(tmp_path, change, field):
  content = copy.deepcopy(GOOD)
  change(content)
  with pytest.raises(ValueError, match=rf"00000.json: {field} "):
    read_conversation(_write(tmp_path, content), EPISODE, "f")


def test_files_cut_anywhere_or_with_bytes_changed_are_read_or_refused(tmp_path):
  text, rng = json.dumps(GOOD), random.Random(0)
  cuts = [text[: rng.randrange(len(text))] for _ in range(60)]
  changed = [text[:i] + rng.choice('"[]{},:0x') + text[i + 1 :] for i in rng.sample(range(len(text)), 150)]
  for content in (*cuts, *changed, "", "null", "[]", "[" * 100_000):
    path = _write(tmp_path, content)
    refused = ""
    try:
      read_conversation(path, EPISODE, "f")
    except ValueError as error:
      refused = str(error)
    assert str(path) in refused if refused else content in changed


def _submission(tmp_path, name, answers):
  data = tmp_path / "data.json"
  data.write_text(json.dumps([{"sample_id": "h", "qa": [{"question": "Who?", "category": 4}, {"question": "Where?"}]}]))
  return submissions.write(tmp_path, name, str(data), [EPISODE], answers, "rag")


@pytest.mark.parametrize("name", ["locomo", "longmemeval", "perltqa"])
def test_a_submission_comes_back(tmp_path, name):
  for answers in ({"h:q0": "Tom\u2028é", "h:q1": ""}, {"h:q1": "Rome"}, {}):
    assert submissions.read(_submission(tmp_path, name, answers), name, [EPISODE]) == answers


def test_submissions_have_the_published_form(tmp_path):
  lines = _submission(tmp_path, "longmemeval", {"h:q0": "Tom"}).read_text().splitlines()
  assert [json.loads(line) for line in lines] == [{"question_id": "h:q0", "hypothesis": "Tom"}]
  (sample,) = json.loads(_submission(tmp_path, "locomo", {"h:q0": "Tom"}).read_text())
  expected = [{"question": "Who?", "category": 4, "rag_prediction": "Tom"}, {"question": "Where?"}]
  assert sample == {"sample_id": "h", "qa": expected}


@pytest.mark.parametrize(
  "line",
  ["{", "5", "{}", '{"question_id": "h:q9", "hypothesis": "x"}', '{"question_id": "h:q0", "hypothesis": 3}',
   '{"question_id": ["h:q0"], "hypothesis": "x"}', '{"question_id": "h:q1", "hypothesis": "again"}', "\x00\xff"],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, line):
  path = tmp_path / "answers.jsonl"
  path.write_text('{"question_id": "h:q1", "hypothesis": "x"}\n\n' + line + "\n", encoding="latin-1")
  with pytest.raises(ValueError, match=r"answers.jsonl:3: "):
    submissions.read(path, "longmemeval", [EPISODE])


@pytest.mark.parametrize(
  "content", ["{}", "[5]", '[{"sample_id": "h", "qa": 5}]', "[", '[{"sample_id": "h", "qa": [{"a_prediction": 5}]}]']
)
def test_bad_predictions_are_named(tmp_path, content):
  path = _write(tmp_path, content)
  with pytest.raises(ValueError, match=str(path)):
    submissions.read(path, "locomo", [EPISODE])


def _run(system, answers, tokens, model="m"):
  content = summarise([EPISODE], answers, [], "x", samples=20, confidence=0.95)
  cost = {"tokens_per_question": tokens}
  return {"system": system, "answer_model": model, "benchmark": "x", "cost": cost} | content


def test_paired_differences_are_of_the_same_questions():
  a, b = _run("a", {"h:q0": "Tom", "h:q1": "Rome"}, 10), _run("b", {"h:q0": "Tom"}, 99)
  assert paired(a, b, "exact").mean == 0.5
  other = copy.deepcopy(b)
  other["measures"]["exact"]["scores"].pop("h:q1")
  assert paired(a, other, "exact") is None


def test_the_front_is_that_of_brute_force():
  rng = random.Random(1)
  for _ in range(200):
    points = [(rng.randint(1, 6), rng.randint(0, 5)) for _ in range(rng.randint(1, 8))]
    beaten = {p for p in points if any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)}
    assert {points[i] for i in pareto(points)} == set(points) - beaten


def test_a_comparison_names_every_run_and_escapes_it():
  runs = [_run("a<b", {"h:q0": "Tom"}, 10), _run("none", {}, 1000, model="other")]
  page = comparison(runs)
  assert "a&lt;b, m" in page
  assert "none, other" in page
  assert "a<b" not in page
  with pytest.raises(ValueError, match="compare runs of one benchmark"):
    comparison([runs[0], runs[1] | {"benchmark": "y"}])
