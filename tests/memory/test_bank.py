"""The bank: what each operation does to it, and what never happens to it."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attrimem_jax.memory.actions import OPERATIONS, Action, Op, Reason, parse, render
from attrimem_jax.memory.bank import Bank, apply, apply_all, from_json, from_notes, to_json
from attrimem_jax.types import CallKey, Finish, Module, Note, Record

CORE, EPISODIC, SEMANTIC = Module.CORE, Module.EPISODIC, Module.SEMANTIC


def bank_of(*texts: str, module: Module = SEMANTIC) -> Bank:
  return Bank(
    tuple(Record(i, module, text, (0,) * len(text.split())) for i, text in enumerate(texts, 1)), len(texts) + 1
  )


def act(bank: Bank, tokenizer, line: str, module: Module = SEMANTIC, budget: int | None = None) -> tuple[Bank, Reason]:
  (action,) = parse(tokenizer.encode(line), tokenizer, module, Finish.STOP)
  owner = CallKey("h", 0, 1, module)
  bank, action = apply(bank, action, module=module, date="2024-03-05", owner=owner, core_budget=budget)
  return bank, action.reason


def view(bank: Bank) -> dict[int, str]:
  return {r.id: r.text for r in bank.current()}


def test_add_keeps_owner_place_and_date(tokenizer):
  (action,) = parse(tokenizer.encode("ADD Ann lives in Lisbon"), tokenizer, SEMANTIC, Finish.STOP)
  owner = CallKey("h", 2, 1, SEMANTIC)
  bank, done = apply(Bank.empty(), action, module=SEMANTIC, date="2024-03-05", owner=owner)
  assert bank.records == (
    Record(1, SEMANTIC, "Ann lives in Lisbon", action.ids, "2024-03-05", owner, action.start, (), True),
  )
  assert (bank.next_id, done) == (2, action)


@pytest.mark.parametrize(
  ("line", "module", "after", "supersedes"),
  [
    ("UPDATE #1 Bob", "semantic", {2: "tea", 3: "Bob"}, (1,)),
    ("MERGE #2 #1 Ann and tea", "episodic", {3: "Ann and tea"}, (1, 2)),
    ("MERGE #1 #2 tea", "episodic", {3: "tea"}, (1, 2)),
    ("REPLACE #2 Bob", "core", {1: "Ann", 3: "Bob"}, (2,)),
    ("REWRITE Bob", "core", {3: "Bob"}, (1, 2)),
  ],
)
def test_a_new_version_takes_the_place_of_the_old(tokenizer, line, module, after, supersedes):
  before = bank_of("Ann", "tea", module=Module(module))
  bank, reason = act(before, tokenizer, line, Module(module))
  assert (reason, view(bank)) == (Reason.OK, after)
  assert bank.get(3).supersedes == supersedes
  assert [r.text for r in bank.records] == ["Ann", "tea", after[3]], "the past stays"
  assert act(bank, tokenizer, line, Module(module)) == (bank, Reason.UNCHANGED), "twice equals once"


def test_delete_hides_a_record_and_twice_equals_once(tokenizer):
  bank, reason = act(bank_of("Ann", "tea"), tokenizer, "DELETE #1")
  assert (reason, view(bank), len(bank.records)) == (Reason.OK, {2: "tea"}, 2)
  assert act(bank, tokenizer, "DELETE #1") == (bank, Reason.UNCHANGED)
  assert act(bank, tokenizer, "UPDATE #1 Ann") == (bank, Reason.SUPERSEDED)
  bank, reason = act(bank, tokenizer, "ADD Ann")
  assert (reason, view(bank)) == (Reason.OK, {2: "tea", 3: "Ann"}), "what was deleted can be told again"


def test_skip_changes_nothing(tokenizer):
  bank = bank_of("Ann")
  assert act(bank, tokenizer, "SKIP") == (bank, Reason.OK)


@pytest.mark.parametrize(
  ("line", "reason"),
  [
    ("UPDATE #9 Ann", Reason.UNKNOWN_ID),
    ("DELETE #0", Reason.UNKNOWN_ID),
    ("ADD  ann", Reason.DUPLICATE),
    ("UPDATE #1 TEA", Reason.DUPLICATE),
    ("UPDATE #1 ANN", Reason.UNCHANGED),
  ],
)
def test_refusals(tokenizer, line, reason):
  bank = bank_of("Ann", "tea")
  assert act(bank, tokenizer, line) == (bank, reason)


def test_ids_of_another_module_are_unknown_and_equal_texts_may_stand_in_two_modules(tokenizer):
  bank = bank_of("Ann", module=EPISODIC)
  assert act(bank, tokenizer, "UPDATE #1 Bob") == (bank, Reason.UNKNOWN_ID)
  assert act(bank, tokenizer, "ADD Ann")[1] == Reason.OK


def test_a_stale_id_is_refused_when_the_record_says_something_else_now(tokenizer):
  bank, _ = act(bank_of("Ann"), tokenizer, "UPDATE #1 Bob")
  bank, _ = act(bank, tokenizer, "UPDATE #2 tea")
  assert act(bank, tokenizer, "UPDATE #1 Bob") == (bank, Reason.SUPERSEDED)
  assert act(bank, tokenizer, "UPDATE #1 tea") == (bank, Reason.UNCHANGED)
  assert act(bank, tokenizer, "DELETE #1") == (bank, Reason.SUPERSEDED)


def test_core_memory_stays_within_its_budget(tokenizer):
  bank = bank_of("a b c", "d e", module=CORE)  # 5 tokens
  assert bank.tokens(CORE) == 5
  assert act(bank, tokenizer, "APPEND tea", CORE, budget=5) == (bank, Reason.OVER_BUDGET)
  assert act(bank, tokenizer, "REPLACE #2 Ann lives in Lisbon", CORE, budget=5) == (bank, Reason.OVER_BUDGET)
  assert act(bank, tokenizer, "REPLACE #2 Ann lives", CORE, budget=5)[1] == Reason.OK
  assert act(bank, tokenizer, "REWRITE Ann lives in Lisbon", CORE, budget=5)[1] == Reason.OK
  assert act(bank, tokenizer, "REPLACE #1 Bob", CORE, budget=2)[1] == Reason.OK, "it makes a full memory smaller"
  assert act(bank_of("a b c"), tokenizer, "ADD tea Ann lives", budget=2)[1] == Reason.OK, "only core has a budget"


def test_a_rejected_action_does_not_stop_the_rest(tokenizer):
  actions = parse(tokenizer.encode("ADD Ann\nWell\nUPDATE #7 x\nADD tea"), tokenizer, SEMANTIC, Finish.STOP)
  bank, done = apply_all(Bank.empty(), actions, module=SEMANTIC, date="", owner=None)
  assert view(bank) == {1: "Ann", 2: "tea"}
  assert [a.reason for a in done] == ["ok", "not_an_action", "unknown_id", "ok"]


def test_a_given_bank_holds_the_ids_that_a_policy_would_have_written(tokenizer):
  notes = [Note(1, CORE, "Bob\n  drinks tea"), Note(0, SEMANTIC, "Ann lives"), Note(1, SEMANTIC, "ann LIVES")]
  bank = from_notes(notes, ["2024-03-04", "2024-03-05"], tokenizer)
  first, second = bank.records
  assert (first.text, first.date, first.owner, first.start) == ("Ann lives", "2024-03-04", None, 0)
  assert tokenizer.decode(first.ids) == " Ann lives"
  assert (second.text, second.module) == ("Bob drinks tea", CORE)
  with pytest.raises(ValueError, match="session 2"):
    from_notes([Note(2, CORE, "x")], ["2024-03-04"], tokenizer)
  with pytest.raises(ValueError, match="give it a text"):
    from_notes([Note(0, CORE, " ")], ["2024-03-04"], tokenizer)


def test_json_gives_an_equal_bank_back(tokenizer, owner):
  bank = from_notes([Note(0, CORE, "Ann 🦜")], [""], tokenizer)
  bank, _ = apply(
    bank, *parse(tokenizer.encode("ADD é"), tokenizer, SEMANTIC, Finish.STOP), module=SEMANTIC, date="", owner=owner
  )
  assert from_json(to_json(bank)) == bank
  assert from_json(to_json(Bank.empty())) == Bank.empty()


@pytest.mark.parametrize(
  "text", ["", "[]", "{}", '{"records": [{}], "next_id": 1}', '{"records": [], "next_id": null}']
)
def test_what_is_no_bank_is_an_error(text):
  with pytest.raises(ValueError, match="no memory bank"):
    from_json(text)


def test_ids_that_do_not_grow_are_an_error():
  twice = Bank((Record(1, CORE, "a", (1,)), Record(1, CORE, "b", (1,))), 2)
  with pytest.raises(ValueError, match="must grow"):
    from_json(to_json(twice))


def _action(op: Op, targets: tuple[int, ...], text: str) -> Action:
  ids = tuple(range(len(text)))
  return Action(op, targets, text, ids, 0, len(ids), Reason.OK, render(op, targets, text), 0, len(ids))


@st.composite
def steps(draw) -> tuple[Module, Action]:
  module = draw(st.sampled_from(Module))
  op = draw(st.sampled_from(OPERATIONS[module]))
  count = {Op.MERGE: 2, Op.UPDATE: 1, Op.REPLACE: 1, Op.DELETE: 1}.get(op, 0)
  targets = draw(st.lists(st.integers(1, 8), min_size=count, max_size=count, unique=True))
  text = "" if op in (Op.DELETE, Op.SKIP) else draw(st.sampled_from(["a", "A", "b", "c c", "d"]))
  return module, _action(op, tuple(targets), text)


@settings(deadline=None)
@given(st.lists(steps(), max_size=20))
def test_whatever_is_applied_the_past_stays_and_twice_equals_once(sequence):
  bank = Bank.empty()
  for module, action in sequence:
    call = {"module": module, "date": "", "owner": None, "core_budget": 3}
    after, done = apply(bank, action, **call)
    assert len(after.records) - len(bank.records) in (0, 1)
    assert [r.text for r in after.records][: len(bank.records)] == [r.text for r in bank.records]
    assert [r.id for r in after.records] == list(range(1, after.next_id))
    assert {r.id for r in after.current()} <= {r.id for r in bank.current()} | {bank.next_id}, "nothing comes back"
    texts = [(r.module, r.text.casefold()) for r in after.current()]
    assert len(set(texts)) == len(texts)
    assert after.tokens(CORE) <= 3
    if done.reason != Reason.OK:
      assert after is bank
    again, _ = apply(after, action, **call)
    assert again == after
    bank = after


def test_ten_thousand_records_stay_fast(tokenizer):
  bank = bank_of(*(f"fact {i}" for i in range(10_000)))
  act(bank, tokenizer, "ADD warm")
  start = time.process_time()
  for i in range(10):
    bank, reason = act(bank, tokenizer, f"UPDATE #{9_000 + i} new {i}")
    assert reason == Reason.OK
  assert (time.process_time() - start) / 10 < 0.25  # about 0.01 s; the bound leaves room for a busy machine
