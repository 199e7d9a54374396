"""A teacher behind an endpoint, scripted: what it reads, which of its lines count, and that a file gives them again."""

import json

import pytest

from attrimem_jax.memory.prompts import FULL
from attrimem_jax.rl import expert, prompted
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import History, Module, Session, Turn
from tests.memory.conftest import TOKENIZER

CHAT = Chat(TOKENIZER)
HISTORIES = [
  History(name, tuple(Session(f"{name}{i}", f"2024-03-0{i + 1}T09:00", (Turn("Ann", text, "t"),))
                      for i, text in enumerate(texts)))
  for name, texts in (("a", ("I live in Lisbon", "I live in Porto")), ("b", ("Tea is nice",)))
]  # fmt: skip
SAID = {
  ("I live in Lisbon", Module.CORE): "APPEND Ann: Lisbon\nAPPEND " + "very " * 200,
  ("I live in Lisbon", Module.EPISODIC): "",
  ("I live in Lisbon", Module.SEMANTIC): "<think>ADD this?</think>\nADD Ann lives in Lisbon\nSure, done!\n- ADD x",
  ("I live in Lisbon", Module.PROCEDURAL): "SKIP",
  ("I live in Porto", Module.CORE): "REPLACE #1 Ann: Porto",
  ("I live in Porto", Module.EPISODIC): "ADD Ann moved\nUPDATE #9 nothing",
  ("I live in Porto", Module.SEMANTIC): "UPDATE #2 Ann lives in Porto",
  ("I live in Porto", Module.PROCEDURAL): None,
  ("Tea is nice", Module.CORE): None,
  ("Tea is nice", Module.EPISODIC): None,
  ("Tea is nice", Module.SEMANTIC): "ADD Ann likes tea",
  ("Tea is nice", Module.PROCEDURAL): "SKIP",
}


def key(messages):
  (_, system), (_, text) = messages
  assert system == FULL.system
  module = next(module for module in Module if FULL.instructions[module] in text)
  return next(turn for turn, _ in SAID if f"Ann: {turn}\n" in text), module


@pytest.fixture
def written():
  asked = []

  def complete(prompts):
    asked.append(prompts)
    return [SAID[key(messages)] for messages in prompts]

  rows, report = prompted.write(complete, CHAT, HISTORIES, core_budget=40, records_budget=100)
  return rows, report, asked


def test_it_reads_what_a_policy_would_and_all_histories_at_once(written):
  _, _, asked = written
  assert [len(prompts) for prompts in asked] == [8, 4]
  texts = {key(messages): messages[1][1] for prompts in asked for messages in prompts}
  assert texts["I live in Porto", Module.SEMANTIC].startswith("Session of Saturday, 2024-03-02 09:00:")
  assert "#2 Ann lives in Lisbon\n" in texts["I live in Porto", Module.SEMANTIC]
  assert "#1 Ann: Lisbon\n" in texts["I live in Porto", Module.CORE]
  assert "of 40 tokens" in texts["I live in Porto", Module.CORE]
  assert "(none yet)" in texts["Tea is nice", Module.SEMANTIC]


def test_lines_that_do_not_count_are_left_out_and_counted(written):
  rows, report, _ = written
  lines = {(row["conversation_id"], row["session_index"], row["agent_type"]): row["actions"] for row in rows}
  assert lines["a", 0, "core"] == "APPEND Ann: Lisbon"  # the second is beyond the budget
  assert lines["a", 0, "semantic"] == "ADD Ann lives in Lisbon"
  assert lines["a", 1, "episodic"] == "ADD Ann moved"
  assert lines["a", 1, "procedural"] is None
  assert report == "12 calls, 3 without a reply, 4 lines that are no action or that the bank refuses"


def test_its_file_is_read_as_experts_are(written, tmp_path):
  path = tmp_path / expert.FILE
  path.write_text("".join(json.dumps(row) + "\n" for row in written[0]), encoding="utf-8")
  trajectories, report = expert.read(path, CHAT)
  assert "2 conversations, 3 sessions, 8 actions (ADD 3, APPEND 1, UPDATE 1, REPLACE 1" in report
  assert "3  call without an output, or one that failed, left out: a/1/procedural, b/0/core" in report
  said = {
    (t.history.id, number, module): CHAT.said(ids)
    for t in trajectories
    for number, here in enumerate(t.calls)
    for module, _, ids in here
  }
  assert said["a", 1, Module.SEMANTIC] == "UPDATE #2 Ann lives in Porto"
  assert said["a", 0, Module.EPISODIC] == ""
  assert said["b", 0, Module.PROCEDURAL] == "SKIP"
  first = trajectories[0]
  assert [s.date for s in first.history.sessions] == [s.date for s in HISTORIES[0].sessions]
  assert [t.text for s in first.history.sessions for t in s.turns] == ["I live in Lisbon", "I live in Porto"]
  for _, before, _ in first.calls[1]:
    assert [(r.id, r.text) for r in before.current()] == [(1, "Ann: Lisbon"), (2, "Ann lives in Lisbon")]


def test_a_teacher_that_says_nothing_at_all_is_an_error():
  with pytest.raises(ValueError, match="the teacher answered none of 12 calls"):
    prompted.write(lambda prompts: [None] * len(prompts), CHAT, HISTORIES, core_budget=40, records_budget=100)
