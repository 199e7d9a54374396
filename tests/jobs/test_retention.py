import json
import lzma

import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax.jobs import retention
from attrimem_jax.jobs.run import Run
from attrimem_jax.validation import validate


def _instance(number, rng):
  """A haystack of three sessions whose gold turn is one of the user's."""
  words = ["river", "piano", "ticket", "garden", "market", "planet", "silver", "window"]
  sessions = [
    [{"role": role, "content": " ".join(rng.choice(words, 6))} for role in ("user", "assistant") * 3] for _ in range(3)
  ]
  sessions[number % 3][2] = {"role": "user", "content": f"My violin is {number} years old", "has_answer": True}
  return {
    "question_id": f"q{number}",
    "question": "How old is my violin?",
    "question_type": "single-session-user",
    "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/21 (Sun) 10:00", "soon"],
    "haystack_sessions": sessions,
  }


@pytest.fixture
def instances():
  rng = np.random.default_rng(0)
  return [_instance(number, rng) for number in range(8)]


def _config(path, preset=""):
  config = schema.recipe("configs/retention.py", preset)
  config.data.path, config.retention.splits = str(path), 3
  return config


@pytest.mark.parametrize("suffix", ["json", "jsonl", "jsonl.xz"])
def test_the_table_is_written_and_its_scores_are_what_sorting_gives(
  suffix, instances, tmp_path, monkeypatch, repository
):
  monkeypatch.chdir(repository)
  path = tmp_path / f"haystacks.{suffix}"
  lines = "\n".join(map(json.dumps, instances))
  text = json.dumps(instances) if suffix == "json" else lines
  path.write_bytes(lzma.compress(text.encode()) if suffix.endswith("xz") else text.encode())
  config = _config(path, "oracle" if suffix == "json" else "")
  validate(config)
  with Run(config, tmp_path / "run") as run:
    retention.run_retention(config, run)
  report = json.loads((tmp_path / "run" / "retention.json").read_text())
  assert report["cases"] == 8
  # recency: dated sessions come first, the newer before the older, in the order of their turns; five of 18 are kept
  recent = [i % 3 == 1 for i in range(8)]
  halves = retention.splits(8, 3, config.seed)
  expected = np.mean([np.mean(np.array(recent)[~half]) for half in halves])
  assert report["policies"]["recency"]["unseen"]["mean"] == pytest.approx(expected)
  assert set(report["learned_minus"]) == set(report["policies"]) - {"learned"}
  learned = report["policies"]["learned"]["fitted"]["mean"]
  assert learned >= report["policies"]["uniform"]["fitted"]["mean"]
  if suffix == "json":
    assert report["policies"]["goal only"]["unseen"]["mean"] == 1


def test_a_blind_table_is_the_same_whatever_will_be_asked(instances, tmp_path):
  def factors(question):
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(json.dumps(instance | {"question": question}) for instance in instances))
    return np.stack(retention.read_cases(str(path), "blind")[0])

  np.testing.assert_array_equal(factors("How old is my violin?"), factors("Where is the river?"))


def test_only_what_the_user_said_is_ranked_where_asked(instances, tmp_path):
  path = tmp_path / "all.jsonl"
  path.write_text("\n".join(map(json.dumps, instances)))
  every, _, _, gold = retention.read_cases(str(path), "blind")
  users, recency, cues, among = retention.read_cases(str(path), "blind", "user")
  for table, part, places, found in zip(every, users, gold, among, strict=True):
    np.testing.assert_array_equal(part, table[::2])  # user and assistant take turns
    assert [2 * place for place in found] == places
  assert {len(row) for row in [*recency, *cues]} == {9}


def test_a_split_is_half_of_the_cases_and_splits_differ():
  halves = retention.splits(7, 5, seed=1)
  assert (halves.sum(axis=1) == 3).all()
  assert len({tuple(row) for row in halves}) > 1
  np.testing.assert_array_equal(halves, retention.splits(7, 5, seed=1))


def test_real_haystacks_are_read_with_all_their_irregularities(shared_data):
  path = shared_data / "longmemeval" / "longmemeval_s_cleaned.sample.json"
  instances = json.loads(path.read_text(encoding="utf-8"))
  for instance in instances:
    known, gold = retention.known_turns(instance)
    turns = [turn for session in instance["haystack_sessions"] for turn in session]
    assert known.texts == tuple(turn["content"] for turn in turns)
    assert gold == [i for i, turn in enumerate(turns) if turn.get("has_answer")]
    assert np.isfinite(known.age).all()
    assert known.age.min() == 0
    cues = retention.surface_cues(known)
    assert cues.shape == (len(turns), 13)
    starts = np.cumsum([0, *[len(s) for s in instance["haystack_sessions"]]])[:-1]
    assert (cues[starts[starts < len(turns)], 11] == 0).all()


def test_a_file_without_gold_turns_and_a_missing_file_are_refused(instances, tmp_path, monkeypatch, repository):
  monkeypatch.chdir(repository)
  path = tmp_path / "none.json"
  path.write_text("[]")
  with pytest.raises(ValueError, match="no case with gold"):
    retention.read_cases(str(path), "blind")
  path.write_text("[{")
  with pytest.raises(ValueError, match="no LongMemEval file"):
    retention.read_cases(str(path), "blind")
  with pytest.raises(ValueError, match="whole haystacks"):
    validate(_config(tmp_path / "absent.json"))
