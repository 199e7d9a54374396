"""The job `benchmark`: goes on with the same numbers, asks another run's memories, scores given answers alike."""

import json

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
