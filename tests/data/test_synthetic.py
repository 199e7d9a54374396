import collections
import datetime

import numpy as np
import pytest

from attrimem_jax.data import chatter, queries, synthetic, world
from attrimem_jax.data.queries import ABSTAIN, Form, Query
from attrimem_jax.data.synthetic import KINDS, WorldConfig, episode
from attrimem_jax.data.world import ATTRIBUTES, Fact
from attrimem_jax.types import Episode, Module

CONFIG = WorldConfig()


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
  return [episode(CONFIG, "train", 0, index) for index in range(300)]


def _notes_as_facts(one: Episode) -> list[tuple[Fact, str]]:
  facts = []
  for note in one.notes:
    fact = world.read_record(note.text)
    assert fact is not None
    facts.append((fact, one.history.sessions[note.session].date))
  return facts


def test_an_episode_is_a_pure_function_of_its_arguments():
  assert episode(CONFIG, "eval", 3, 7) == episode(CONFIG, "eval", 3, 7)
  assert episode(CONFIG, "eval", 3, 7).history.sessions != episode(CONFIG, "eval", 3, 8).history.sessions
  assert episode(CONFIG, "eval", 3, 7).history.sessions != episode(CONFIG, "eval", 4, 7).history.sessions


def test_no_two_histories_are_the_same_within_or_across_splits():
  drawn = [episode(CONFIG, split, 0, index) for split in synthetic.SPLITS for index in range(200)]
  assert len({one.history.sessions for one in drawn}) == len(drawn)
  assert len({one.history.id for one in drawn}) == len(drawn)


@pytest.mark.parametrize(("split", "seed", "index"), [("valid", 0, 0), ("train", -1, 0), ("train", 0, -1)])
def test_bad_arguments_are_named(split: str, seed: int, index: int):
  with pytest.raises(ValueError, match=r"synthetic\.episode got"):
    episode(CONFIG, split, seed, index)


@pytest.mark.parametrize(
  "sizes", [{"sessions": (0, 2)}, {"facts": (3, 2)}, {"chatter": (-1, 0)}, {"questions": (0, 5)}]
)
def test_a_range_that_cannot_be_drawn_from_is_refused(sizes: dict):
  with pytest.raises(ValueError, match=rf"WorldConfig\.{next(iter(sizes))}"):
    WorldConfig(**sizes)


@pytest.mark.parametrize("low", [True, False])
def test_the_smallest_and_largest_worlds_can_be_drawn(low: bool):
  sizes = ((1, 1), (1, 1), (0, 0), (1, 1)) if low else ((8, 8), (6, 6), (20, 20), (20, 20))
  for index in range(20):
    one = episode(WorldConfig(*sizes), "test", 0, index)
    assert len(one.history.sessions) == sizes[0][0]
    assert one.questions


def test_sizes_stay_within_the_configured_ranges(episodes: list[Episode]):
  assert {len(one.history.sessions) for one in episodes} == {2, 3, 4}
  assert max(len(one.questions) for one in episodes) == 10
  assert np.mean([len(one.questions) >= 6 for one in episodes]) > 0.8  # a short story may hold less to ask


def test_sessions_are_dated_in_order_and_turns_have_unique_ids(episodes: list[Episode]):
  for one in episodes:
    dates = [datetime.date.fromisoformat(session.date) for session in one.history.sessions]
    assert dates == sorted(set(dates))
    ids = [turn.id for session in one.history.sessions for turn in session.turns]
    assert len(ids) == len(set(ids))
    assert all(question.date > one.history.sessions[-1].date for question in one.questions)


def test_every_question_is_answered_from_the_notes_by_rule(episodes: list[Episode]):
  for one in episodes:
    facts = _notes_as_facts(one)
    for question in one.questions:
      query = queries.read(question.text)
      assert query is not None
      said = queries.sentence(query, facts)
      assert said == (ABSTAIN if question.abstain else question.answers[1])


def test_the_bare_answer_is_part_of_the_sentence(episodes: list[Episode]):
  answered = [question for one in episodes for question in one.questions if not question.abstain]
  assert all(bare in sentence for bare, sentence in (question.answers for question in answered))


def test_evidence_turns_hold_the_value(episodes: list[Episode]):
  for one in episodes:
    turns = {turn.id: turn.text for session in one.history.sessions for turn in session.turns}
    for question in one.questions:
      assert bool(question.evidence) == (not question.abstain)
      if question.kind in ("single-session", "knowledge-update"):
        assert question.answers[0] in turns[question.evidence[-1]]


def test_kinds_have_their_shares(episodes: list[Episode]):
  counts = collections.Counter(question.kind for one in episodes for question in one.questions)
  share = {kind: counts[kind] / counts.total() for kind in KINDS}
  assert set(counts) == set(KINDS)
  assert 0.09 < share["abstention"] < 0.15
  assert all(share[kind] > 0.08 for kind in KINDS)


def test_counts_and_values_cannot_be_guessed(episodes: list[Episode]):
  answers = collections.Counter(q.answers[0] for one in episodes for q in one.questions if q.answers)
  assert answers.most_common(1)[0][1] / answers.total() < 0.06
  counted = collections.Counter(q.answers[0][0] for one in episodes for q in one.questions if q.kind == "multi-session")
  assert set(counted) == {"1", "2", "3", "4"}
  assert max(counted.values()) / counted.total() < 0.4


def test_no_question_stands_in_a_history_and_none_is_asked_twice(episodes: list[Episode]):
  for one in episodes:
    said = "\n".join(turn.text for session in one.history.sessions for turn in session.turns)
    texts = [question.text for question in one.questions]
    assert not any(text in said for text in texts)
    assert len(set(texts)) == len(texts)


def test_only_the_users_own_facts_are_profile_routine_or_event(episodes: list[Episode]):
  for one in episodes:
    user = one.history.sessions[0].turns[0].speaker
    for note in one.notes:
      fact = world.read_record(note.text)
      assert fact is not None
      assert note.module == (ATTRIBUTES[fact.attribute].module if fact.subject == user else Module.SEMANTIC)


def test_a_session_that_corrects_itself_leaves_one_note(episodes: list[Episode]):
  corrected = 0
  for one in episodes:
    topics = [(n.session, world.read_topic(n.text)) for n in one.notes if n.module != Module.EPISODIC]
    assert len(topics) == len(set(topics))
    corrected += any(turn.text.startswith("Wait") for session in one.history.sessions for turn in session.turns)
  assert corrected


def test_values_tell_their_attribute():
  words = [value for attribute in ATTRIBUTES.values() for value in attribute.values if not value.isdigit()]
  assert len(words) == len(set(words))
  assert not set(words) & set(world.NAMES)
  assert all(len(attribute.values) >= 30 for attribute in ATTRIBUTES.values())


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_a_record_reads_back_and_a_vague_one_keeps_its_topic_only(name: str):
  fact = Fact("Ann", name, ATTRIBUTES[name].values[-1])
  assert world.read_record(f"{world.record_text(fact)}.") == fact
  assert world.read_record(world.vague_text(fact)) is None
  assert world.read_topic(world.vague_text(fact)) == ("Ann", name)


@pytest.mark.parametrize("text", ["", "Ann", "Ann lives in Atlantis", "ann lives in Rome", "Ann saw a film about Rome"])
def test_other_texts_are_no_records(text: str):
  assert world.read_record(text) is None


def test_small_talk_is_told_from_facts():
  rng = np.random.default_rng(0)
  for _ in range(200):
    note = chatter.careless_note(chatter.say(rng), "Ann")
    assert note is not None
    assert world.read_topic(note[1]) is None
  assert chatter.careless_note("I live in Rome.", "Ann") is None


ANN = [
  (Fact("Ann", "home", "Rome"), "2024-01-05"),
  (Fact("Ann", "visit", "zoo"), "2024-01-05"),
  (Fact("Ann", "home", "Porto"), "2024-02-07"),
  (Fact("Ann", "visit", "lake"), "2024-02-07"),
  (Fact("Ann", "purchase", "lamp"), "2024-03-01"),
]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("Where does Ann live?", "Ann lives in Porto."),
    ("Which city does Ann live in now?", "Ann lives in Porto."),
    ("Where does Tom live?", ABSTAIN),
    ("When did Ann visit a place?", "Ann did so on 2024-01-05."),
    ("On which day did Ann buy a thing?", "Ann did so on 2024-03-01."),
    ("When did Ann meet a person?", ABSTAIN),
    ("When did Ben buy a thing?", ABSTAIN),
    ("How many places did Ann visit?", "Ann visited 2 places."),
    ("What number of things did Ann buy?", "Ann bought 1 thing."),
    ("How many people did Ann meet?", ABSTAIN),
    ("Did Ann buy a thing or visit a place first?", "Ann visited the zoo first."),
    ("Did Ann buy a thing or meet a person first?", ABSTAIN),
  ],
)
def test_answers_worked_by_hand(text: str, expected: str):
  query = queries.read(text)
  assert query is not None
  assert queries.sentence(query, ANN) == expected


def test_the_latest_date_wins_whatever_the_order_and_the_last_of_equal_dates():
  query = Query(Form.VALUE, "Ann", "home")
  assert queries.sentence(query, ANN[::-1]) == "Ann lives in Porto."
  same_day = [(Fact("Ann", "home", city), "2024-01-05") for city in ("Rome", "Oslo")]
  assert queries.sentence(query, same_day) == "Ann lives in Oslo."


def test_undated_events_have_no_when():
  assert queries.sentence(Query(Form.WHEN, "Ann", "visit"), [(Fact("Ann", "visit", "zoo"), "")]) == ABSTAIN


@pytest.mark.parametrize(
  ("query", "expected"),
  [
    (Query(Form.WHEN, "Ann", "visit"), "Ann did so on 2024-01-05."),
    (Query(Form.FIRST, "Ann", "purchase", "visit"), "Ann visited some place first."),
    (Query(Form.VALUE, "Ann", "visit"), ABSTAIN),
    (Query(Form.COUNT, "Ann", "visit"), ABSTAIN),
  ],
)
def test_an_event_that_lost_its_value_still_tells_its_day(query: Query, expected: str):
  facts = [(Fact("Ann", "visit", ""), "2024-01-05"), (Fact("Ann", "purchase", "lamp"), "2024-03-01")]
  assert queries.sentence(query, facts) == expected


def test_only_an_event_that_is_alone_of_its_kind_is_dated(episodes: list[Episode]):
  """Else more than one day would be right."""
  for one in episodes:
    told = [fact for note in one.notes if (fact := world.read_record(note.text)) is not None]
    for question in one.questions:
      query = queries.read(question.text)
      assert query is not None
      if query.form in (Form.WHEN, Form.FIRST):
        kinds = [kind for kind in (query.attribute, query.other) if kind]
        assert all(sum(fact.attribute == kind for fact in told) == (not question.abstain) for kind in kinds)


def test_what_is_no_question_of_this_world_reads_as_none():
  assert queries.read("What is love?") is None
