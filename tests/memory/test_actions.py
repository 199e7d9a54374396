"""The grammar, token by token."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attrimem_jax.memory.actions import FORMS, OPERATIONS, Action, Op, Reason, parse, render
from attrimem_jax.types import Finish, Module

SEMANTIC = Module.SEMANTIC


def read(tokenizer, text: str | list[int], module: Module = SEMANTIC, finish: Finish = Finish.STOP) -> list[Action]:
  return list(parse(tokenizer.encode(text) if isinstance(text, str) else text, tokenizer, module, finish))


def reasons(actions: list[Action]) -> list[Reason]:
  return [action.reason for action in actions]


def test_an_action_is_the_policys_own_tokens(tokenizer, ids):
  completion = ids("ADD", " Ann", " tea", "\n", "SKIP", "<|im_end|>")
  add, skip = read(tokenizer, completion)
  assert (add.op, add.text, add.ids, add.start, add.stop) == (Op.ADD, "Ann tea", tuple(ids(" Ann", " tea")), 1, 3)
  assert (add.line, add.line_start, add.line_stop) == ("ADD Ann tea", 0, 4)
  assert (skip.op, skip.text, skip.ids, skip.line_start, skip.line_stop) == (Op.SKIP, "", (), 4, 5)


def test_a_token_with_the_last_letter_and_the_line_break_belongs_to_the_text(tokenizer, ids):
  add, skip = read(tokenizer, ids("ADD", " tea", ".\n", "SKIP"))
  assert add.text == "tea."
  assert (add.start, add.stop) == (1, 3)
  assert skip.reason == Reason.OK


def test_a_token_across_two_lines_belongs_to_both(tokenizer, ids):
  first, second = read(tokenizer, ids("ADD", " ", "A", "n.\nSKIP"))
  assert (first.text, first.start, first.stop) == ("An.", 2, 4)
  assert (first.line_stop, second.line_start) == (4, 3)
  assert second.op == Op.SKIP


def test_a_character_in_two_tokens_is_whole_in_the_text(tokenizer, ids):
  (add,) = read(tokenizer, ids("ADD", " ", b"\xc3", b"\xa9"))
  assert (add.text, add.start, add.stop) == ("é", 2, 4)


def test_half_a_character_is_kept_as_a_token(tokenizer, ids):
  (add,) = read(tokenizer, ids("ADD", " ", "x", b"\xc3"))
  assert (add.text, add.ids) == ("x\N{REPLACEMENT CHARACTER}", tuple(ids("x", b"\xc3")))


def test_the_first_stop_token_ends_the_text(tokenizer, ids):
  assert read(tokenizer, ids("<|im_end|>", "SKIP")) == []
  (add,) = read(tokenizer, ids("ADD", " tea", "<|im_end|>", " Ann"))
  assert (add.text, add.line_stop) == ("tea", 2)


def test_blank_lines_and_surrounding_blanks_are_no_text(tokenizer):
  actions = read(tokenizer, "\n \r\n  ADD \t Ann\u3000\r\n\n")
  assert [(a.op, a.text) for a in actions] == [(Op.ADD, "Ann")]


@pytest.mark.parametrize(
  ("line", "module", "op", "targets", "text"),
  [
    ("UPDATE #3 Ann", "semantic", Op.UPDATE, (3,), "Ann"),
    ("UPDATE #3 #4 is her seat", "semantic", Op.UPDATE, (3,), "#4 is her seat"),
    ("DELETE #12", "semantic", Op.DELETE, (12,), ""),
    ("SKIP", "procedural", Op.SKIP, (), ""),
    ("MERGE #3 #4  #5 tea", "episodic", Op.MERGE, (3, 4, 5), "tea"),
    ("MERGE #3 #4 #3 tea", "episodic", Op.MERGE, (3, 4), "tea"),
    ("ADD #5 is her number", "episodic", Op.ADD, (), "#5 is her number"),
    ("APPEND tea", "core", Op.APPEND, (), "tea"),
    ("REPLACE #0 tea", "core", Op.REPLACE, (0,), "tea"),
    ("REWRITE Ann: tea {x} ADD", "core", Op.REWRITE, (), "Ann: tea {x} ADD"),
  ],
)
def test_accepted(tokenizer, line, module, op, targets, text):
  (action,) = read(tokenizer, line, Module(module))
  assert (action.op, action.targets, action.text, action.reason) == (op, targets, text, Reason.OK)
  assert tokenizer.decode(action.ids).strip() == text


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("Here are the actions:", Reason.NOT_AN_ACTION),
    ("add Ann", Reason.NOT_AN_ACTION),
    ("ADD: Ann", Reason.NOT_AN_ACTION),
    ("- ADD Ann", Reason.NOT_AN_ACTION),
    ("ADDITION Ann", Reason.NOT_AN_ACTION),
    ('{"op": "ADD"}', Reason.NOT_AN_ACTION),
    ("SKIP nothing new", Reason.NOT_AN_ACTION),
    ("DELETE #3 Ann", Reason.NOT_AN_ACTION),
    ("DELETE #3 #4", Reason.NOT_AN_ACTION),
    ("MERGE #3 #4 tea", Reason.WRONG_MODULE),
    ("APPEND tea", Reason.WRONG_MODULE),
    ("UPDATE Ann", Reason.WRONG_TARGETS),
    ("UPDATE #three Ann", Reason.WRONG_TARGETS),
    ("UPDATE #1234567890 Ann", Reason.WRONG_TARGETS),
    ("UPDATE #٣ Ann", Reason.WRONG_TARGETS),
    ("UPDATE #3, Ann", Reason.WRONG_TARGETS),
    ("DELETE", Reason.WRONG_TARGETS),
    ("DELETE Ann", Reason.WRONG_TARGETS),
    ("ADD", Reason.EMPTY_TEXT),
    ("ADD   ", Reason.EMPTY_TEXT),
    ("UPDATE #3", Reason.EMPTY_TEXT),
  ],
)
def test_rejected_with_its_reason_while_the_rest_applies(tokenizer, line, reason):
  assert reasons(read(tokenizer, f"ADD tea\n{line}\nADD Ann")) == [Reason.OK, reason, Reason.OK]


@pytest.mark.parametrize(("line", "reason"), [("MERGE tea", "wrong_targets"), ("MERGE #3 tea", "wrong_targets")])
def test_merge_takes_two_records(tokenizer, line, reason):
  assert reasons(read(tokenizer, line, Module.EPISODIC)) == [reason]


def test_the_length_limit_costs_the_unfinished_line_only(tokenizer):
  text = "ADD Ann\nADD Bob li"
  assert reasons(read(tokenizer, text, finish=Finish.LENGTH)) == [Reason.OK, Reason.UNFINISHED]
  assert reasons(read(tokenizer, text + "\n", finish=Finish.LENGTH)) == [Reason.OK, Reason.OK]
  assert reasons(read(tokenizer, "ADD Ann\n  ", finish=Finish.LENGTH)) == [Reason.OK]


def test_a_control_token_is_never_text(tokenizer, ids):
  sampled = [*ids("ADD", " Ann", "<|im_start|>", " tea", "\n"), *ids("ADD", " Bob")]
  broken, whole = read(tokenizer, sampled)
  assert (broken.op, broken.ids, broken.reason) == (None, (), Reason.NOT_AN_ACTION)
  assert whole.reason == Reason.OK
  assert reasons(read(tokenizer, [*ids("ADD", " Ann"), tokenizer.vocab_size + 7])) == [Reason.NOT_AN_ACTION]
  assert reasons(read(tokenizer, "ADD <|im_start|>")) == [Reason.OK], "spelt out it is ordinary text"


def test_thoughts_are_no_actions(tokenizer, ids):
  thought = [*ids("<think>", "\n"), *tokenizer.encode("ADD tea\n"), *ids("</think>", "\n\n")]
  (add,) = read(tokenizer, thought + tokenizer.encode("ADD Ann"))
  assert (add.text, add.start) == ("Ann", len(thought) + 1)
  assert reasons(read(tokenizer, thought[:-2])) == [Reason.NOT_AN_ACTION]
  assert reasons(read(tokenizer, thought[:-3], finish=Finish.LENGTH)) == [Reason.UNFINISHED]


def test_every_form_that_prompts_show_is_read_back(tokenizer):
  assert set(FORMS) == set(Op) == {op for ops in OPERATIONS.values() for op in ops}
  for module, op in ((module, op) for module, ops in OPERATIONS.items() for op in ops):
    counter = itertools.count(3)
    line = "".join(
      f"{next(counter)}" if part == "<number>" else part
      for part in FORMS[op].replace("<", "\0<").replace(">", ">\0").split("\0")
    )
    (action,) = read(tokenizer, line.replace("<text>", "tea"), module)
    assert (action.op, action.reason) == (op, Reason.OK)
    assert render(action.op, action.targets, action.text) == action.line


def test_render_keeps_one_line():
  assert render(Op.UPDATE, [3], " Ann\n lives ") == "UPDATE #3 Ann lives"


@settings(deadline=None)
@given(st.data())
def test_random_tokens_never_raise_and_spans_cut_the_bytes(tokenizer, data):
  known = st.integers(0, tokenizer.vocab_size + 3)
  lines = st.sampled_from(
    ["ADD", "UPDATE", " #", "3", "\n", " Ann", ".\n", "n.\nSKIP", "\nADD", "SKIP", "<think>", "</think>"]
  )
  by_bytes = {tokenizer.bytes(i): i for i in range(tokenizer.vocab_size)}
  completion = data.draw(st.lists(known | lines.map(lambda text: by_bytes[text.encode()]), max_size=30))
  module, finish = data.draw(st.sampled_from(Module)), data.draw(st.sampled_from(Finish))
  for action in parse(completion, tokenizer, module, finish):
    assert action.ids == tuple(completion[action.start : action.stop])
    held = b"".join(map(tokenizer.bytes, action.ids))
    if "\N{REPLACEMENT CHARACTER}" not in action.text:
      assert action.text.encode() in held
    assert bool(action.text) == bool(action.ids)
    assert action.line_start <= action.start <= action.stop <= action.line_stop
    if action.ids:  # no token of the range lies outside of the text
      first, last = tokenizer.bytes(action.ids[0]), tokenizer.bytes(action.ids[-1])
      inner = len(held) - len(first) - len(last)
      assert len(action.ids) == 1 or inner < len(action.text.encode()) or "\N{REPLACEMENT CHARACTER}" in action.text
