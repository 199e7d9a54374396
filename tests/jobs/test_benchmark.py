"""The job `benchmark`: goes on with the same numbers, asks another run's memories, scores given answers alike.

A scripted endpoint stands for judges and answer models elsewhere.
"""

import json
import math

import pytest

from attrimem_jax import config as schema
from attrimem_jax import validation
from attrimem_jax.jobs.benchmark import episodes, run_benchmark
from attrimem_jax.jobs.run import Run
from attrimem_jax.view.benchmark import comparison, read_results


def _config(repository, tiny, **values):
  config = schema.recipe(repository / "configs" / "grpo_token.py")
  with config.unlocked():
    config.update_from_flattened_dict(
      {
        "job": "benchmark",
        "policy.model": str(tiny[0]),
        "answer.model": str(tiny[1]),
        "answer.max_new_tokens": 8,
        "rollout.max_new_tokens": 8,
        "eval.episodes": 2,
        "eval.system": "rag_utterance",
        **values,
      }
    )
  validation.validate(config)
  return config


def _run(config, workdir):
  with Run(config, workdir) as run:
    run_benchmark(config, run)
  return read_results(workdir)


def _answers(workdir):
  files = sorted((workdir / "conversations").glob("*.json"))
  return [a for file in files for a in json.loads(file.read_text(encoding="utf-8"))["answers"]]


@pytest.fixture(scope="module")
def whole(repository, tiny, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, _run(_config(repository, tiny), workdir)


def test_a_run_leaves_scores_of_all_questions_and_its_pages(whole, repository, tiny):
  workdir, found = whole
  asked = [q.id for _, e in episodes(_config(repository, tiny))[0] for q in e.questions]
  assert list(found["measures"]["contains"]["scores"]) == asked == [a["id"] for a in _answers(workdir)]
  assert found["cost"]["answer_calls"] == len(asked)
  assert found["cost"]["write_tokens"] == 0
  assert "Scores" in (workdir / "report.html").read_text(encoding="utf-8")
  assert "rag_utterance" in comparison([found, found | {"system": "other"}])


def test_what_is_missing_is_asked_again_with_the_same_numbers(whole, repository, tiny, tmp_path):
  workdir, found = whole
  _run(_config(repository, tiny, **{"eval.episodes": 1}), tmp_path)
  (kept,) = (tmp_path / "conversations").glob("*.json")
  stamp = kept.stat().st_mtime_ns
  again = _run(_config(repository, tiny), tmp_path)
  assert kept.stat().st_mtime_ns == stamp
  assert _answers(tmp_path) == _answers(workdir)
  assert again["measures"] == found["measures"]
  with pytest.raises(ValueError, match=r"eval.system: 'rag_utterance' there, 'none' now"):
    _run(_config(repository, tiny, **{"eval.system": "none"}), tmp_path)


def test_memories_of_a_run_give_its_answers_again_and_another_model_its_own(whole, repository, tiny, tmp_path):
  workdir, found = whole
  same = _run(_config(repository, tiny, **{"eval.memories": str(workdir)}), tmp_path / "same")
  assert same["measures"] == found["measures"]
  assert same["system"] == "rag_utterance"
  other = _run(
    _config(repository, tiny, **{"eval.memories": str(workdir), "answer.model": str(tiny[0])}), tmp_path / "b"
  )
  assert other["answer_model"] != found["answer_model"]
  assert [a["answer"] for a in _answers(tmp_path / "b")] != [a["answer"] for a in _answers(workdir)]


def test_a_file_of_answers_is_scored_as_the_run_that_gave_them(whole, repository, tiny, tmp_path):
  workdir, found = whole
  given = _run(_config(repository, tiny, **{"eval.answers": str(workdir / "submission.jsonl")}), tmp_path)
  assert given["measures"] == found["measures"]
  assert "cost" not in given


def test_the_policy_and_those_without_retrieval_answer(repository, tiny, tmp_path):
  for system in ("policy", "full_context", "oracle", "none"):
    found = _run(_config(repository, tiny, **{"eval.system": system, "eval.episodes": 1}), tmp_path / system)
    assert (found["cost"]["write_tokens"] > 0) == (system == "policy")
    assert not found["missing"]


def test_a_broken_conversation_is_named(whole, repository, tiny, tmp_path):
  _run(_config(repository, tiny, **{"eval.episodes": 1}), tmp_path)
  (path,) = (tmp_path / "conversations").glob("*.json")
  path.write_text(path.read_text(encoding="utf-8")[:99], encoding="utf-8")
  with pytest.raises(ValueError, match=f"{path}: file is broken or cut JSON"):
    _run(_config(repository, tiny), tmp_path)


def _judge(body, number):
  """Right is what holds the reference, refusals are right, and it has no verdict about answers with an exclamation."""
  texts = json.loads(body["messages"][-1]["content"].rpartition("\n\n")[0])
  if "!" in texts["answer"]:
    return "Well, that is hard to say."
  wanted = texts["reference"].split(" / ") if "reference" in texts else ["never"]
  right = any(text.lower() in texts["answer"].lower() for text in wanted)
  return json.dumps({"verdict": "correct" if right else "wrong"})


def _with_judge(endpoint, **values):
  return {"eval.judge.url": endpoint.url, "eval.judge.model": "strict", "eval.judge.prices": (1.0, 4.0), **values}


def test_a_judge_scores_what_it_judged_and_tells_how_good_it_is(whole, repository, tiny, tmp_path, endpoint):
  """Answers of known quality are judged: the first right, the second without a verdict, the rest wrong or missing."""
  endpoint.script = _judge
  questions = [q for _, e in episodes(_config(repository, tiny))[0] for q in e.questions]
  plain = [q for q in questions if not q.abstain]
  answers = {plain[0].id: f"It is {plain[0].answers[0]}", plain[1].id: "Who knows!", plain[2].id: "zzz"}
  given = tmp_path / "answers.jsonl"
  given.write_text("".join(json.dumps({"id": i, "prediction": a}) + "\n" for i, a in answers.items()))
  values = _with_judge(endpoint, **{"eval.answers": str(given), "eval.judge.calibration": 8})
  found = _run(_config(repository, tiny, **values), tmp_path / "run")
  judge, measure = found["judge"], found["measures"]["judge"]
  assert judge["unjudged"] == [plain[1].id]
  assert measure["overall"][0] == 1 / (len(questions) - 1)
  assert plain[1].id not in measure["scores"]
  assert measure["scores"][plain[0].id] == 1
  assert not judge["comparable"]  # one of a few is more than a hundredth
  assert (judge["calibration"]["recall"], judge["calibration"]["specificity"]) == (1, 1)
  assert judge["calibration"]["right"] + judge["calibration"]["wrong"] == 16
  asked = 16 + 2 + 3  # the known answers, two judged at once, one tried three times
  assert (judge["spent"]["requests"], judge["spent"]["failed"]) == (asked, 0)
  assert math.isclose(judge["spent"]["money"], asked * (7 * 1 + 3 * 4) / 1e6)
  page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
  assert "planted wrong answers called wrong, of 8" in page
  assert "do not compare" in page
  assert len(endpoint.seen) == asked
  again = _run(_config(repository, tiny, **values), tmp_path / "run")
  assert again["measures"] == found["measures"]
  assert len(endpoint.seen) == asked  # all of it came from the file of replies


def test_a_finished_run_can_be_judged_afterwards_and_its_answers_stay(whole, repository, tiny, tmp_path, endpoint):
  endpoint.script = _judge
  plain = _run(_config(repository, tiny), tmp_path)
  kept = [path.stat().st_mtime_ns for path in sorted((tmp_path / "conversations").glob("*.json"))]
  judged = _run(_config(repository, tiny, **_with_judge(endpoint)), tmp_path)
  assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "conversations").glob("*.json"))] == kept
  assert {name: rows for name, rows in judged["measures"].items() if name != "judge"} == plain["measures"]
  assert "judge" in comparison([judged, plain | {"system": "other"}])


def test_a_judge_that_cannot_be_reached_leaves_all_unjudged(whole, repository, tiny, tmp_path, endpoint):
  endpoint.script = lambda body, number: (500, b"{}")
  values = _with_judge(endpoint, **{"eval.judge.retries": 0, "eval.judge.calibration": 0, "eval.judge.tries": 1})
  found = _run(_config(repository, tiny, **values, **{"eval.episodes": 1}), tmp_path)
  assert found["measures"]["judge"]["overall"] == [None] * 3
  assert len(found["judge"]["unjudged"]) == found["questions"]
  assert "<b>Too many" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_model_elsewhere_answers_from_the_same_passages(repository, tiny, tmp_path, endpoint):
  def script(body, number):
    return (400, b"{}") if number == 2 else "From memory: " + body["messages"][-1]["content"]

  endpoint.script = script
  values = {"answer.endpoint.url": endpoint.url, "answer.endpoint.model": "big", "answer.endpoint.prices": (1.0, 4.0)}
  values |= {"answer.endpoint.concurrency": 1, "answer.prompts": "full"}
  found = _run(_config(repository, tiny, **values), tmp_path)
  answers = _answers(tmp_path)
  assert found["answer_model"] == "big"
  assert found["missing"] == [answers[1]["id"]]  # the request that failed
  files = [json.loads(p.read_text(encoding="utf-8")) for p in sorted((tmp_path / "conversations").glob("*.json"))]
  first = files[0]
  shown = first["answers"][0]["shown"]
  assert shown
  for place in shown:
    text, date, _ = first["passages"][first["retrieved"][0][place]]
    assert f"[{date.partition('T')[0]}]" in answers[0]["answer"]
    assert text in answers[0]["answer"]
  assert answers[0]["question"] in answers[0]["answer"]
  assert endpoint.seen[0]["messages"][0]["role"] == "system"
  assert (answers[0]["read"], answers[0]["written"]) == (7, 3)
  count = len(answers) - 1
  assert math.isclose(found["cost"]["answer_money"], count * (7 * 1 + 3 * 4) / 1e6)
  assert "answer money" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_an_answer_model_that_is_down_stops_the_run_which_goes_on_later(repository, tiny, tmp_path, endpoint):
  endpoint.script = lambda body, number: (500, b"{}")
  values = {"answer.endpoint.url": endpoint.url, "answer.endpoint.model": "big", "answer.endpoint.retries": 0}
  with pytest.raises(ValueError, match=r"big answered none of \d+ questions, the last because of InternalServerError"):
    _run(_config(repository, tiny, **values), tmp_path)
  assert not list((tmp_path / "conversations").glob("*"))
  endpoint.script = lambda body, number: "an answer"
  assert not _run(_config(repository, tiny, **values), tmp_path)["missing"]


@pytest.mark.parametrize(
  ("values", "what"),
  [
    ({"url": "localhost:8000"}, "url: is no address"),
    ({"model": " "}, "model: is empty"),
    ({"key_env": "NO_SUCH_KEY"}, "key_env: this environment variable is not set"),
    ({"parameters": "temperature=0"}, "parameters: must be a JSON object"),
    ({"parameters": '{"stream": true}'}, "parameters: must be a JSON object, without messages, model, n, stream"),
    ({"prices": (1.0,)}, "prices: must be two numbers"),
    ({"concurrency": 0}, "concurrency: must be a finite number of at least 1"),
  ],
)
def test_a_wrong_endpoint_is_refused_before_any_work(repository, tiny, values, what):
  for part in ("eval.judge", "answer.endpoint"):
    named = {f"{part}.{n}": v for n, v in ({"url": "http://127.0.0.1:9/v1", "model": "m"} | values).items()}
    with pytest.raises(ValueError, match=f"config.{part}.{what}"):
      _config(repository, tiny, **named)


def test_only_a_benchmark_asks_an_endpoint_for_answers(repository, tiny):
  values = {"answer.endpoint.url": "http://127.0.0.1:9/v1", "answer.endpoint.model": "m", "job": "train"}
  with pytest.raises(ValueError, match="can be asked by job 'benchmark' alone, not by 'train'"):
    _config(repository, tiny, **values)
