"""Writing memory: who draws what, in which order banks change, and what a writer can never see."""

import dataclasses
import inspect
import typing

import jax
import numpy as np
import pytest

from attrimem_jax.memory.actions import Reason, parse
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import COMPACT, module_suffix, session_prefix
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.rollout import writing
from attrimem_jax.rollout.sampling import Sampling
from attrimem_jax.rollout.writing import Window, Writer, fold, write
from attrimem_jax.types import CallKey, History, Module, Question, Record

EPISODIC, SEMANTIC = Module.EPISODIC, Module.SEMANTIC


@pytest.fixture
def writer(writer_model, scripted, monkeypatch) -> Writer:
  """Writes with the scripted sampler."""
  monkeypatch.setattr(writing, "complete", scripted)
  return Writer(writer_model, COMPACT, Sampling(8), Bm25(5))


def spoken(rollout) -> dict[CallKey, tuple[list[int], ...]]:
  return {call.key: (call.prompt, call.completion.ids.tolist()) for call in rollout.calls}


def test_the_same_key_writes_the_same_and_another_key_does_not(writer, history, key):
  window = Window(history, 0, 0, 3)
  first, again, other = (write(writer, [window], 2, k)[0] for k in (key, key, jax.random.key(8)))
  assert [spoken(r) for r in first] == [spoken(r) for r in again]
  assert [r.bank for r in first] == [r.bank for r in again]
  assert spoken(first[0]) != spoken(other[0])
  assert [c.completion.ids.tolist() for c in first[0].calls] != [c.completion.ids.tolist() for c in first[1].calls]


def test_a_rollout_depends_neither_on_group_size_nor_on_other_windows(writer, history, key):
  window, other = Window(history, 4, 1, 3), Window(dataclasses.replace(history, id="other"), 9, 0, 1)
  (alone,) = write(writer, [window], 1, key)
  _, among = write(writer, [other, window], 3, key)
  assert spoken(alone[0]) == spoken(among[0])
  assert alone[0].bank == among[0].bank


def test_the_numbers_of_a_call_are_its_key(writer, history, key, scripted):
  """Window number, rollout, session of the history and module, folded in this order with `fold_in` itself."""
  write(writer, [Window(history, 4, 1, 3)], 2, key)
  for offset, call in enumerate(scripted.seen):
    for row, (g, m) in enumerate(np.ndindex(2, 4)):
      expected = key
      for number in (4, g, 1 + offset, m):
        expected = jax.random.fold_in(expected, number)
      np.testing.assert_array_equal(call.keys[0, row], jax.random.key_data(expected))


def test_every_path_has_a_key_of_its_own(key):
  paths = np.array(list(np.ndindex(3, 3, 3, 4)), np.uint32)
  assert len({tuple(row) for row in fold(key, paths)}) == len(paths)
  np.testing.assert_array_equal(fold(key, paths[:5]), fold(key, paths)[:5])


def test_a_window_that_ends_early_stays_as_padding(writer, history, key, scripted):
  short, long = Window(history, 0, 0, 1), Window(dataclasses.replace(history, id="g"), 1, 0, 3)
  (a, _), (b, _) = write(writer, [short, long], 2, key)
  assert [len(r.calls) for r in (a, b)] == [4, 12]
  assert [(len(c.prefixes), [len(p) for p in c.prompts], c.keys.shape) for c in scripted.seen] == [
    (2, [8, 8], (2, 8, 2)),
    (2, [8, 0], (2, 8, 2)),
    (2, [8, 0], (2, 8, 2)),
  ]
  assert spoken(write(writer, [short], 2, key)[0][0]) == spoken(a)


def test_calls_know_who_made_them_and_what_they_read(writer, history, key):
  (group,) = write(writer, [Window(history, 0, 1, 3)], 2, key)
  for g, rollout in enumerate(group):
    assert rollout.index == g
    assert [c.key for c in rollout.calls] == [CallKey("h", g, s, m) for s in (1, 2) for m in Module]
    chat = writing.Chat(writer.model.tokenizer)
    for call in rollout.calls:
      assert call.prefix == session_prefix(chat, COMPACT, history.sessions[call.key.session])
    opening = {c.key.module: c.prompt for c in rollout.calls if c.key.session == 1}
    assert opening[SEMANTIC] == module_suffix(chat, COMPACT, SEMANTIC, ())


def test_modules_read_the_bank_as_it_was_before_the_session(writer, history, key):
  (group,) = write(writer, [Window(history, 0, 0, 2)], 1, key)
  chat = writing.Chat(writer.model.tokenizer)
  first = [r for r in group[0].bank.records if r.owner.session == 0]
  for call in group[0].calls[4:]:
    mine = [r for r in first if r.module == call.key.module]
    usage = (sum(len(r.ids) for r in mine), writer.core_budget) if call.key.module == Module.CORE else None
    assert call.prompt == module_suffix(chat, COMPACT, call.key.module, mine, usage)


def test_actions_carry_their_reasons_and_records_their_owners(writer, history, key):
  (group,) = write(writer, [Window(history, 0, 0, 2)], 2, key)
  for rollout in group:
    calls = {call.key: call for call in rollout.calls}
    for call in rollout.calls:
      expected = parse(call.completion.ids, writer.model.tokenizer, call.key.module, call.completion.finish)
      assert [a.line for a in call.actions] == [a.line for a in expected]
      assert call.actions[-1].reason == Reason.NOT_AN_ACTION
      if call.key.module == Module.CORE:
        assert call.actions[0].reason == Reason.WRONG_MODULE, "core memory has no ADD"
    assert {r.module for r in rollout.bank.records} == {EPISODIC, SEMANTIC, Module.PROCEDURAL}
    for record in rollout.bank.records:
      written = calls[record.owner].completion.ids[record.start : record.start + len(record.ids)]
      np.testing.assert_array_equal(record.ids, written)
      assert record.owner.rollout == rollout.index
      assert record.date == history.sessions[record.owner.session].date


def test_a_given_bank_is_read_and_owned_by_nobody(writer, history, key):
  tokens = tuple(writer.model.tokenizer.encode(" Bob drinks tea"))
  bank = Bank((Record(1, SEMANTIC, "Bob drinks tea", tokens),), 2)
  (group,) = write(writer, [Window(history, 0, 2, 3, bank)], 2, key)
  for rollout in group:
    assert rollout.bank.records[0] == bank.records[0]
    (call,) = [c for c in rollout.calls if c.key.module == SEMANTIC]
    assert module_suffix(writing.Chat(writer.model.tokenizer), COMPACT, SEMANTIC, bank.records) == call.prompt


def test_modules_can_be_left_out(writer, history, key):
  some = dataclasses.replace(writer, modules=(SEMANTIC,))
  (group,) = write(some, [Window(history, 0, 0, 1)], 1, key)
  (all_of_them,) = write(writer, [Window(history, 0, 0, 1)], 1, key)
  assert spoken(group[0]) == {k: v for k, v in spoken(all_of_them[0]).items() if k.module == SEMANTIC}


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 2), (-1, 1), (0, 4), (2, 1)])
def test_a_window_needs_a_session(history, start, stop):
  with pytest.raises(ValueError, match=f"'h' has 3 sessions.*got {start}:{stop}"):
    Window(history, 0, start, stop)


def test_a_history_without_sessions_cannot_be_written():
  with pytest.raises(ValueError, match="'empty' has 0 sessions"):
    Window(History("empty", ()), 0, 0, 1)


def test_no_question_fits_into_what_a_writer_is_given():
  """Every type that `write` can reach through fields, other than the frozen parts of the writer: none is a Question."""

  def reachable(kind, found: set) -> set:
    for part in typing.get_args(kind) or (kind,):
      if dataclasses.is_dataclass(part) and part not in found:
        found.add(part)
        for field in typing.get_type_hints(part).values():
          reachable(field, found)
      elif typing.get_args(part):
        reachable(part, found)
    return found

  parameters = typing.get_type_hints(write)
  assert set(inspect.signature(write).parameters) == {"writer", "windows", "group", "key"}
  types = reachable(parameters["windows"], set()) | reachable(parameters["writer"], set())
  assert {Window, History, Bank, Record} <= types
  assert Question not in types
  assert not any("question" in field.name for kind in (Window, History) for field in dataclasses.fields(kind))


def test_with_a_real_network_too(writer_model, history, key):
  """Bit for bit again, and the rollout of a group of one is the first of a group of two."""
  writer = Writer(writer_model, COMPACT, Sampling(8), Bm25(5), modules=(EPISODIC, SEMANTIC), step=32)
  window = Window(history, 3, 1, 2)
  (two,), (again,), (one,) = (write(writer, [window], group, key) for group in (2, 2, 1))
  assert [spoken(r) for r in two] == [spoken(r) for r in again]
  for a, b in zip(two, again, strict=True):
    for first, second in zip(a.calls, b.calls, strict=True):
      np.testing.assert_array_equal(first.completion.logps, second.completion.logps)
  assert spoken(one[0]) == spoken(two[0])
  assert all(1 <= len(c.completion.ids) <= 8 for r in two for c in r.calls)
