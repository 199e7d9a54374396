"""Tasks are functions of the configuration and the step, and ask only about what a window shows."""

import types

import pytest

from attrimem_jax import config as configs
from attrimem_jax.data import locomo, synthetic
from attrimem_jax.jobs.tasks import Tasks, askable
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import COMPACT, session_prefix
from attrimem_jax.rollout.writing import Window
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Episode, History, Module, Note, Question, Session, Turn
from tests.memory.conftest import TOKENIZER

CHAT = Chat(TOKENIZER)


def configured(**changes):
  """The default configuration with dotted keys changed, as `**{"data.split": "train"}`."""
  config = configs.default()
  config.update_from_flattened_dict({"rollout.histories": 3, "eval.episodes": 4} | changes)
  return config


def tasks(**changes) -> Tasks:
  return Tasks(configured(**changes), CHAT, COMPACT)


def episode_of(name: str, sessions: int = 4) -> Episode:
  """Each session has two turns, a question about it and a note; one question is about the first and third session."""
  history = History(
    name,
    tuple(
      Session(f"s{i}", f"2024-03-0{i + 1}", (Turn("Ann", f"fact {i}", f"{i}a"), Turn("Bob", "yes", f"{i}b")))
      for i in range(sessions)
    ),
  )
  asked = [Question(f"{name}-{i}", f"what is {i}", (str(i),), "single", (f"{i}a",)) for i in range(sessions)]
  asked.append(Question(f"{name}-both", "what are both", ("x",), "multi", ("0a", "2b")))
  asked.append(Question(f"{name}-none", "what is it not", (), "abstain"))
  notes = tuple(Note(i, Module.SEMANTIC, f"fact {i}") for i in range(sessions))
  return Episode(history, tuple(asked), notes)


def asked(start: int, stop: int) -> set[str]:
  episode = episode_of("e")
  return {q.id.removeprefix("e-") for q in askable(episode, Window(episode.history, 0, start, stop))}


def test_a_steps_tasks_do_not_depend_on_what_ran_before():
  fresh, used = tasks(), tasks()
  for step in (4, 0, 2):
    used.training(step)
  used.evaluation()
  assert used.training(7) == fresh.training(7)
  assert used.training(7) == used.training(7)
  assert fresh.training(7) != fresh.training(8)


def test_no_history_comes_twice_in_training_and_none_is_evaluated():
  run = tasks()
  trained = [task.window.history for step in range(5) for task in run.training(step)]
  evaluated = [task.window.history for task in run.evaluation()]
  assert len({h.id for h in trained}) == 15
  assert not {h.sessions for h in trained} & {h.sessions for h in evaluated}
  assert [t.window.number for t in run.training(2)] == [6, 7, 8]


def test_the_seed_of_the_run_chooses_what_is_trained_on_but_not_what_is_evaluated():
  changes = {"rollout.horizon.sessions": 1, "reward.questions": 1}
  one, other = ([t for s in range(6) for t in tasks(seed=seed, **changes).training(s)] for seed in (0, 1))
  assert len({t.window.history.id for t in one + other}) == len(one) + len(other)
  assert [t.window.start for t in one] != [t.window.start for t in other]
  assert all(len(t.questions) <= 1 for t in one)
  asked = [[(t.window, t.questions) for t in tasks(seed=seed).evaluation()] for seed in (0, 1)]
  assert asked[0] == asked[1]


def test_all_questions_of_the_whole_history_in_evaluation():
  config = configured()
  world = synthetic.WorldConfig(**{k: tuple(v) for k, v in config.data.synthetic.items()})
  for i, task in enumerate(tasks().evaluation()):
    episode = synthetic.episode(world, "test", 0, i)
    assert task.window == Window(episode.history, i, 0, len(episode.history.sessions))
    assert task.questions == episode.questions


def test_every_draw_of_a_step_has_histories_of_its_own():
  changes = {"seed": 1023}
  drawn = [tasks(**changes).training(step, draw) for step in range(3) for draw in range(4)]
  assert len({task.window.history.id for some in drawn for task in some}) == 3 * 3 * 4
  assert all(task.window.number < 2**32 for some in drawn for task in some)
  assert tasks(**changes).training(2, 3) == drawn[-1]


def test_training_may_ask_fewer_kinds_than_evaluation():
  kinds = synthetic.KINDS[:2]
  run = tasks(**{"reward.kinds": kinds})
  assert {q.kind for step in range(8) for task in run.training(step) for q in task.questions} == set(kinds)
  assert run.evaluation() == tasks().evaluation()


def test_chosen_questions_keep_their_order_and_kinds():
  kinds = synthetic.KINDS[:2]
  run = tasks(**{"data.kinds": tuple(kinds), "reward.questions": 2})
  every = tasks(**{"reward.questions": 0})
  for step in range(4):
    for few, full in zip(run.training(step), every.training(step), strict=True):
      assert {q.kind for q in few.questions} <= set(kinds)
      places = [full.questions.index(q) for q in few.questions]
      assert places == sorted(places)
      assert len(set(places)) <= 2


@pytest.mark.parametrize(
  ("start", "stop", "expected"),
  [
    (0, 4, {"0", "1", "2", "3", "both", "none"}),
    (0, 2, {"0", "1"}),  # half of the evidence of `both` lies ahead
    (0, 3, {"0", "1", "2", "both"}),
    (1, 3, {"1", "2", "both"}),  # the rest of its evidence lies before
    (3, 4, {"3", "none"}),
    (1, 2, {"1"}),
  ],
)
def test_what_can_be_asked_after_a_window(start, stop, expected):
  assert asked(start, stop) == expected


def test_a_window_takes_the_reference_bank_of_all_that_came_before():
  run = tasks(**{"rollout.horizon.sessions": 1, "rollout.horizon.bank": "reference"})
  world = synthetic.WorldConfig(**{k: tuple(v) for k, v in configured().data.synthetic.items()})
  later = 0
  for step in range(6):
    for task in run.training(step):
      window = task.window
      episode = synthetic.episode(world, "train", 0, window.number)
      notes = [note for note in episode.notes if note.session < window.start]
      assert window.stop == window.start + 1
      assert {r.text for r in window.bank.current()} <= {note.text for note in notes}
      assert bool(window.bank.records) == bool(notes)
      assert all(record.owner is None for record in window.bank.records)
      later += window.start > 0
  assert later > 0
  assert all(t.window.bank == Bank.empty() for t in tasks(**{"rollout.horizon.sessions": 1}).training(0))


@pytest.fixture
def conversations(monkeypatch) -> list[Episode]:
  """Five conversations in the place of LoCoMo's, the last two held out."""
  episodes = [episode_of(name) for name in "abcde"]
  report = types.SimpleNamespace(text=lambda: "five conversations")
  monkeypatch.setattr(locomo, "read", lambda path: (tuple(episodes), report))
  return episodes


def test_a_finite_set_comes_in_epochs_without_repetition(conversations):
  run = tasks(**{"data.name": "locomo"})
  assert run.report.startswith("five conversations\n")
  assert "12  question of split 'test' that split 'train' holds too: d-0" in run.report
  epochs = [[task.window.history.id for task in run.training(step)] for step in range(6)]
  assert all(sorted(epoch) == ["a", "b", "c"] for epoch in epochs)
  assert len(set(map(tuple, epochs))) > 1, "in another order each time"
  assert run.training(3) == tasks(**{"data.name": "locomo"}).training(3)


def test_held_out_conversations_are_each_evaluated_once(conversations):
  evaluated = tasks(**{"data.name": "locomo"}).evaluation()
  assert sorted(task.window.history.id for task in evaluated) == ["d", "e"]
  by_name = {e.history.id: e for e in conversations}
  assert all(task.questions == by_name[task.window.history.id].questions for task in evaluated)


def test_a_window_of_small_talk_has_no_questions(conversations):
  run = tasks(**{"data.name": "locomo", "data.kinds": ("multi",), "rollout.horizon.sessions": 1})
  for step in range(4):
    for task in run.training(step):
      assert [q.kind for q in task.questions] == (["multi"] if task.window.start == 2 else [])


def test_a_session_that_is_split_keeps_questions_and_notes_at_their_place(conversations):
  """Prompts so short that each turn is a session of its own: eight in all, two for each of the four."""
  run = tasks(**{"data.name": "locomo", "policy.overlong": "split", "policy.max_prompt": 2 * _room(conversations[0])})
  (task, *_) = run.training(0)
  sessions = task.window.history.sessions
  assert [s.id for s in sessions] == [f"s{i}/{k}" for i in range(4) for k in (1, 2)]
  assert len(task.questions) == configured().reward.questions
  name = task.window.history.id
  (source,) = [e for e in conversations if e.history.id == name]
  fitted = run._fitted(source)
  assert [sessions[note.session].id for note in fitted.notes] == ["s0/2", "s1/2", "s2/2", "s3/2"]
  assert {q.id for q in askable(fitted, Window(fitted.history, 0, 0, 5))} == {f"{name}-{i}" for i in (0, 1, 2)}


@pytest.mark.parametrize(("kinds", "part"), [(("temporal",), "eval"), (("single",), None)])
def test_data_with_nothing_to_ask_are_refused(conversations, kinds, part):
  changes = {"data.name": "locomo", "data.path": "x", "eval.split": "test", "data.kinds": kinds}
  if part is None:
    tasks(**changes)
    return
  with pytest.raises(ValueError, match=rf"config.{part}.split='test' hold no question of the kinds temporal"):
    tasks(**changes)


def test_questions_whose_evidence_was_cut_are_never_asked(conversations):
  """Prompts that hold one turn cut the first of each session, on which all questions with evidence are but "both"."""
  run = tasks(**{"data.name": "locomo", "policy.overlong": "cut", "policy.max_prompt": 2 * _room(conversations[0])})
  fitted = run._fitted(conversations[0])
  assert [[t.id for t in s.turns] for s in fitted.history.sessions] == [["0b"], ["1b"], ["2b"], ["3b"]]
  assert {q.id for q in askable(fitted, Window(fitted.history, 0, 0, 4))} == {"a-none"}


def _room(episode: Episode) -> int:
  """Tokens of a session that holds the longer of its two turns alone."""
  session = episode.history.sessions[0]
  return len(session_prefix(CHAT, COMPACT, Session(session.id, session.date, session.turns[:1])))
