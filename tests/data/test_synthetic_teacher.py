import pathlib

import numpy as np
import pytest

import attrimem_jax
from attrimem_jax.data import chatter, world
from attrimem_jax.data.synthetic import WorldConfig, episode
from attrimem_jax.data.teacher import PERFECT, Sloppiness, gold_records, teacher_actions
from attrimem_jax.memory.actions import parse
from attrimem_jax.memory.bank import Bank, apply_all
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Episode, Finish, History, Module, Note, Record, Session, Turn

TOKENIZER = Tokenizer.load(pathlib.Path(attrimem_jax.__file__).parent / "assets" / "tokenizer")
EPISODES = [episode(WorldConfig(), "eval", 1, index) for index in range(60)]


def _write(one: Episode, sloppiness: Sloppiness = PERFECT, seed: int = 0) -> tuple[Bank, list[str]]:
  """Returns the bank after all calls of a teacher and the reasons its actions got."""
  rng, bank, reasons = np.random.default_rng(seed), Bank.empty(), []
  for number, session in enumerate(one.history.sessions):
    for module in Module:
      text = teacher_actions(one, number, module, bank, sloppiness=sloppiness, rng=rng)
      actions = parse(TOKENIZER.encode(text), TOKENIZER, module, Finish.STOP)
      bank, done = apply_all(bank, actions, module=module, date=session.date, owner=None)
      reasons += [action.reason for action in done]
  return bank, reasons


def test_a_perfect_teacher_leaves_the_gold_records_and_errs_in_no_action():
  for one in EPISODES:
    bank, reasons = _write(one)
    assert sorted((r.module, r.text, r.date) for r in bank.current()) == sorted(gold_records(one))
    assert set(reasons) <= {"ok"}


def test_the_bank_keeps_the_old_versions_that_gold_records_list():
  for one in EPISODES:
    bank, _ = _write(one)
    assert sorted((r.module, r.text, r.date) for r in bank.records) == sorted(gold_records(one, keep_old=True))


def test_perfection_draws_nothing():
  for module in Module:
    assert teacher_actions(EPISODES[0], 0, module, Bank.empty()) == teacher_actions(
      EPISODES[0], 0, module, Bank.empty(), rng=np.random.default_rng(5)
    )


def _one(module: Module, text: str) -> Episode:
  session = Session("S1", "2024-01-02", (Turn("Ann", "The weather is nice.", "S1:1"),))
  return Episode(History("h", (session,)), (), (Note(0, module, text),))


def _held(module: Module, *texts: str) -> Bank:
  return Bank(tuple(Record(i, module, text, (), "2024-01-01") for i, text in enumerate(texts, 4)), 4 + len(texts))


@pytest.mark.parametrize(
  ("module", "text", "held", "expected"),
  [
    (Module.CORE, "Ann lives in Rome", (), "APPEND Ann lives in Rome"),
    (Module.CORE, "Ann lives in Rome", ("Ann works as a cook", "Ann lives in Oslo"), "REPLACE #5 Ann lives in Rome"),
    (Module.CORE, "Ann lives in Rome", ("Ann lives in Rome",), ""),
    (Module.SEMANTIC, "Ann plays the harp", ("Tom plays the lute",), "ADD Ann plays the harp"),
    (Module.SEMANTIC, "Ann plays the harp", ("Ann plays something",), "UPDATE #4 Ann plays the harp"),
    (Module.SEMANTIC, "Ann plays the harp", ("Ann plays the harp",), "SKIP"),
    (Module.EPISODIC, "Ann met Olga", ("Ann met Nils",), "ADD Ann met Olga"),
    (Module.PROCEDURAL, "Ann goes to work by bus", ("Ann goes to work by tram",), "UPDATE #4 Ann goes to work by bus"),
  ],
)
def test_actions_worked_by_hand(module: Module, text: str, held: tuple[str, ...], expected: str):
  assert teacher_actions(_one(module, text), 0, module, _held(module, *held)) == expected


@pytest.mark.parametrize(
  ("module", "expected"), [(Module.CORE, ""), (Module.SEMANTIC, "SKIP"), (Module.PROCEDURAL, "SKIP")]
)
def test_nothing_to_write(module: Module, expected: str):
  assert teacher_actions(_one(Module.EPISODIC, "Ann met Olga"), 0, module, Bank.empty()) == expected


def test_a_teacher_that_misses_everything_writes_nothing():
  bank, _ = _write(EPISODES[0], Sloppiness(miss=1.0))
  assert bank.records == ()


def test_a_teacher_that_blurs_everything_leaves_no_value():
  for one in EPISODES:
    bank, _ = _write(one, Sloppiness(blur=1.0))
    assert bank.records
    assert all(world.read_record(r.text) is None for r in bank.records)
    assert all(world.read_topic(r.text) is not None for r in bank.records)


def test_sloppiness_is_a_rate():
  sloppiness, made = Sloppiness(miss=0.3, chatter=0.4, blur=0.2), {"written": 0, "blurred": 0, "junk": 0}
  rng = np.random.default_rng(0)
  notes = idle = 0
  for one in EPISODES:
    user = one.history.sessions[0].turns[0].speaker
    for number, session in enumerate(one.history.sessions):
      idle += len({chatter.careless_note(turn.text, user) for turn in session.turns} - {None})
      for module in Module:
        lines = teacher_actions(one, number, module, Bank.empty(), sloppiness=sloppiness, rng=rng).splitlines()
        texts = [line.split(" ", 1)[1] for line in lines if line != "SKIP"]
        made["junk"] += sum(world.read_topic(text) is None for text in texts)
        made["written"] += sum(world.read_topic(text) is not None for text in texts)
        made["blurred"] += sum(world.read_topic(t) is not None and world.read_record(t) is None for t in texts)
    notes += len(one.notes)
  assert made["written"] / notes == pytest.approx(0.7, abs=0.07)
  assert made["blurred"] / made["written"] == pytest.approx(0.2, abs=0.07)
  assert made["junk"] / idle == pytest.approx(0.4, abs=0.07)


def test_a_careless_teacher_needs_a_generator_and_rates_must_be_probabilities():
  with pytest.raises(ValueError, match="pass a numpy Generator"):
    teacher_actions(EPISODES[0], 0, Module.CORE, Bank.empty(), sloppiness=Sloppiness(miss=0.1))
  with pytest.raises(ValueError, match=r"Sloppiness\.blur is 1\.5"):
    Sloppiness(blur=1.5)
