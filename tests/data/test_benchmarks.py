"""Which conversations a split holds, and what two splits have in common."""

import json

import pytest

from attrimem_jax.data import benchmarks, longmemeval
from attrimem_jax.types import Episode, History, Question, Session, Turn


def _episode(name, question, told):
  history = History(name, (Session("s", "", (Turn("user", told, "s:1"), Turn("user", "Hello", "s:2"))),))
  return Episode(history, (Question(name, question, ("x",), "kind", ("s:1",)),))


def test_holdout():
  assert benchmarks.holdout("abcde", "train", 2) == ("a", "b", "c")
  assert benchmarks.holdout("abcde", "test", 2) == ("d", "e")
  assert benchmarks.holdout("abcde", "all", 2) == tuple("abcde")


@pytest.mark.parametrize(("name", "count"), [("eval", 1), ("test", 0), ("train", 5)])
def test_holdout_refuses(name, count):
  with pytest.raises(ValueError, match=r"config\.data\.holdout"):
    benchmarks.holdout("abcde", name, count)


def test_named_splits_keep_the_order_of_the_data():
  episodes = [_episode(name, "Who?", "Ada") for name in "abc"]
  table = {"rl": ("c", "a", "elsewhere"), "test": ("nowhere",)}
  assert [e.history.id for e in benchmarks.named(episodes, table, "rl")] == ["a", "c"]
  assert len(benchmarks.named(episodes, table, "all")) == 3
  with pytest.raises(ValueError, match=r"no split 'sft': use rl, test, all"):
    benchmarks.named(episodes, table, "sft")
  with pytest.raises(ValueError, match="none of the 1 conversations of split 'test'"):
    benchmarks.named(episodes, table, "test")


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"rl": ["a"], "test": ["b", "a"]}', "id 'a' stands in 'rl' and in 'test'"),
    ('{"rl": [3]}', "'rl' holds \\[3\\]"),
    ('["a"]', "write {split"),
    ("{", "no JSON file that can be read"),
  ],
)
def test_files_of_splits_that_are_refused(text, message, tmp_path):
  (tmp_path / "splits.json").write_text(text, encoding="utf-8")
  with pytest.raises(ValueError, match=f"config.data.splits: .*{message}"):
    benchmarks.read_splits(tmp_path / "splits.json")


def test_overlap_by_id_question_and_evidence_but_not_by_small_talk():
  train = [_episode("a", "Where is it?", "In Oslo"), _episode("b", "Who?", "Ada")]
  assert benchmarks.overlap(train, [_episode("c", "When?", "In May")]) == {}
  assert benchmarks.overlap(train, [_episode("a", "where  is it?", "in oslo")]) == {
    "conversation": ("a",),
    "question": ("a",),
    "evidence": ("a:s:1",),
  }


def test_the_real_split_covers_the_real_questions_once(shared_data):
  table = benchmarks.read_splits(shared_data / "longmemeval" / "membuilder_splits.dev.json")
  episodes, _ = longmemeval.read(shared_data / "longmemeval" / "longmemeval_oracle.dev.json.xz")
  parts = {name: benchmarks.named(episodes, table, name) for name in table}
  assert json.loads(json.dumps({name: len(part) for name, part in parts.items()})) == {"sft": 38, "rl": 43, "test": 324}
  assert "conversation" not in benchmarks.overlap(parts["rl"], parts["test"])
