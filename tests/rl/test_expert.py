"""Expert trajectories in MemBuilder's form become actions that this project's grammar reads and its bank takes."""

import json

import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax.jobs.sft import Examples
from attrimem_jax.memory.actions import Reason, parse
from attrimem_jax.memory.bank import Bank, apply_all
from attrimem_jax.rl import expert
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Finish, Module
from tests.memory.conftest import TOKENIZER

CHAT = Chat(TOKENIZER)


def call(session, module, output, conversation="c", stamp="2023/05/20 (Sat) 02:21"):
  said = [{"role": "user", "content": "I live\nin Lisbon."}, {"role": "assistant", "content": "Nice."}]
  return {
    "conversation_id": conversation,
    "session_index": session,
    "agent_type": module,
    "input": {"new_session": {"timestamp": stamp, "messages": said}},
    "expert_output": output,
  }


def core(session, text, operation="APPEND"):
  return call(session, "core", {"operation": operation, "new_core_memory": text})


def others(session, module, *operations):
  return call(session, module, {"operations": list(operations), "memories_added": []})


def add(text):
  return {"action": "ADD", "memory": text}


def update(old, new):
  return {"action": "UPDATE", "old_memory": old, "new_memory": new}


def merge(old, new):
  return {"action": "MERGE", "old_memories": old, "new_memory": new}


def converted(tmp_path, *calls):
  """(lines by (session, module), report, trajectories) of a file with these calls."""
  path = tmp_path / "agent_calls.jsonl"
  path.write_text("".join((c if isinstance(c, str) else json.dumps(c)) + "\n" for c in calls))
  trajectories, report = expert.read(path, CHAT)
  lines = {
    (number, module): TOKENIZER.decode(ids[:-1]).split("\n")
    for number, here in enumerate(trajectories[0].calls)
    for module, _, ids in here
  }
  return lines, report, trajectories


def test_records_are_found_by_the_text_that_the_expert_quotes(tmp_path):
  lines, report, trajectories = converted(
    tmp_path,
    others(0, "episodic", add("[EPISODIC] 2023: Ann\nmoved"), add("Ann ran"), add("Ann swam")),
    others(0, "semantic", add("Ann likes tea"), {"action": "SKIP", "reason": "x"}),
    others(0, "procedural"),
    others(1, "episodic", merge(["Ann ran", "[EPISODIC] Ann swam"], "Ann is fit")),
    others(1, "semantic", ["UPDATE", "ann likes tea", "Ann likes coffee"]),
    others(1, "procedural", {"action": "SKIP"}),
  )  # fmt: skip
  assert lines[0, Module.EPISODIC] == ["ADD 2023: Ann moved", "ADD Ann ran", "ADD Ann swam"]
  assert lines[0, Module.SEMANTIC] == ["ADD Ann likes tea"]
  assert lines[0, Module.PROCEDURAL] == ["SKIP"]
  assert lines[1, Module.EPISODIC] == ["MERGE #2 #3 Ann is fit"]
  assert lines[1, Module.SEMANTIC] == ["UPDATE #4 Ann likes coffee"]
  session = trajectories[0].history.sessions[0]
  assert session.date == "2023-05-20T02:21"
  assert [(t.speaker, t.text) for t in session.turns] == [("user", "I live in Lisbon."), ("assistant", "Nice.")]
  assert "1 conversations, 2 sessions, 8 actions (ADD 4, APPEND 0, UPDATE 1" in report
  assert "call without an output, or one that failed, left out: c/0/core, c/1/core" in report


def test_core_memory_changes_line_by_line_and_is_written_again_only_where_lines_go(tmp_path):
  blocks = [
    ("Name: Ann", "APPEND"),
    ("Name: Ann\nHome: Lisbon\n\nJob: nurse", "APPEND"),
    ("Name: Ann\nHome: Oslo\nJob: nurse", "REPLACE"),
    ("Name: Ann B.\nHome: Oslo\nJob: nurse\nPet: cat", "REWRITE"),
    ("Name: Ann B.\nJob: nurse", "REWRITE"),
    ("Name: Ann B.\nJob: nurse\nCar: none", "APPEND"),
  ]
  lines, report, trajectories = converted(tmp_path, *(core(i, *block) for i, block in enumerate(blocks)))
  written = [lines[i, Module.CORE] for i in range(len(blocks))]
  assert written == [
    ["APPEND Name: Ann"],
    ["APPEND Home: Lisbon", "APPEND Job: nurse"],
    ["REPLACE #2 Home: Oslo"],
    ["REPLACE #1 Name: Ann B.", "APPEND Pet: cat"],
    ["REWRITE Name: Ann B. Job: nurse"],
    ["APPEND Car: none"],
  ]
  assert "1  core memory whose lines went or moved, written again as one record: c/4/core" in report
  bank = Bank.empty()
  for (only,), session in zip(trajectories[0].calls, trajectories[0].history.sessions, strict=True):
    module, before, ids = only
    assert [record.text for record in before.current()] == [record.text for record in bank.current()]
    actions = parse(ids, TOKENIZER, module, Finish.STOP)
    bank, done = apply_all(bank, actions, module=module, date=session.date, owner=None)
    assert {action.reason for action in done} == {Reason.OK}
  assert [record.text for record in bank.current()] == ["Name: Ann B. Job: nurse", "Car: none"]


def test_what_cannot_be_taken_over_is_counted_and_the_rest_is_kept(tmp_path):
  lines, report, _ = converted(
    tmp_path,
    others(0, "semantic", add("Ann runs"), add("ann  runs"), update("not told", "Ann swims"), {"action": "FORGET"}, 7),
    "{broken",
    json.dumps({"conversation_id": "c"}),
    call(0, "episodic", {"operation": "ERROR"}),
    others(1, "semantic", update("Ann runs", "Ann walks"), update("Ann runs", "Ann rests"), add("")) | {
      "input": {"new_session": {"timestamp": "soon", "messages": [3]}}},
  )  # fmt: skip
  assert lines[0, Module.SEMANTIC] == ["ADD Ann runs", "ADD Ann swims"]
  assert lines[1, Module.SEMANTIC] == ["UPDATE #1 Ann walks", "ADD Ann rests"]
  assert (0, Module.EPISODIC) not in lines
  for line in (
    "2  line that is no call",
    "3  operation that cannot be read",
    "2  change of a record that is not current, added as a new one: c/0/semantic, c/1/semantic",
    "1  action that the bank refuses",
    "1  session date that cannot be read, left empty: c/1",
  ):
    assert line in report


@pytest.mark.parametrize(
  ("stamp", "date"),
  [
    ("2023/05/20 (Sat) 02:21", "2023-05-20T02:21"),
    ("1:56 pm on 8 May, 2023", "2023-05-08T13:56"),
    ("2024-03-15", "2024-03-15"),
    ("", ""),
  ],
)
def test_dates_of_the_benchmarks(tmp_path, stamp, date):
  _, report, trajectories = converted(
    tmp_path, others(0, "semantic", add("x")) | {"input": {"new_session": {"timestamp": stamp}}}
  )
  assert trajectories[0].history.sessions[0].date == date
  assert expert.Change.DATE not in report


def test_nothing_to_read_is_told(tmp_path):
  with pytest.raises(ValueError, match=r"there are no expert trajectories at .*nowhere"):
    expert.read(tmp_path / "nowhere", CHAT)
  with pytest.raises(ValueError, match="holds no call of an expert"):
    expert.read(tmp_path, CHAT)


def test_a_policy_learns_from_experts_and_the_last_conversations_are_held_out(tmp_path, repository, capsys):
  for name in ("a", "b", "z"):
    (tmp_path / name).mkdir()
    calls = [others(i, "semantic", add(f"Ann has {name} {i}")) | {"conversation_id": name} for i in range(3)]
    (tmp_path / name / "agent_calls.jsonl").write_text("".join(json.dumps(c) + "\n" for c in calls))
  config = schema.recipe(repository / "configs" / "sft.py", "policy")
  config.sft.path, config.data.holdout = str(tmp_path), 1
  examples = Examples(config, TOKENIZER)
  assert "3 conversations, 9 sessions, 9 actions" in capsys.readouterr().out

  def completions(split, number):
    shared = examples.batch_of(split, number, 16).shared
    width = config.sft.widths.completion
    ids = shared.suffix[:, 0, -width:]
    return [
      TOKENIZER.decode(row[mask].tolist()) for row, mask in zip(ids, shared.suffix_mask[:, 0, -width:], strict=True)
    ]

  trained, held = ({text.split()[3] for text in completions(split, 0)} for split in ("train", "test"))
  assert (trained, held) == ({"a", "b"}, {"z"})
  np.testing.assert_array_equal(completions("train", 3), completions("train", 3))
  config.data.holdout = 3
  with pytest.raises(ValueError, match="nothing is left to train on"):
    Examples(config, TOKENIZER)
