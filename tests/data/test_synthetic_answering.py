import numpy as np
import pytest

from attrimem_jax.data import answering, queries, world
from attrimem_jax.data.queries import ABSTAIN
from attrimem_jax.data.synthetic import WorldConfig, episode
from attrimem_jax.data.world import Fact

EXAMPLES = [
  (one, *answering.answer_example(np.random.default_rng(index), one))
  for index, one in enumerate(episode(WorldConfig(), "train", 2, index) for index in range(300))
]
ANN = Fact("Ann", "home", "Rome")
ITEM = answering._Item("Ann lives in Rome", "2024-01-02", (ANN,))


def test_an_example_is_a_pure_function_of_its_generator():
  one, records, asked = EXAMPLES[5]
  assert answering.answer_example(np.random.default_rng(5), one) == (records, asked)


def test_every_question_gets_a_target_and_records_come_in_time_order():
  for one, records, asked in EXAMPLES:
    assert tuple(question for question, _ in asked) == one.questions
    assert [date for _, date in records] == sorted(date for _, date in records)


def test_a_target_rests_on_words_of_the_records():
  """What a target says beyond its question stands in some record."""
  for _, records, asked in EXAMPLES:
    shown = " ".join(f"[{date}] {text}" for text, date in records)
    for question, target in asked:
      query = queries.read(question.text)
      assert query is not None
      if target == ABSTAIN:
        continue
      assert query.subject in shown
      if query.form == queries.Form.COUNT:
        assert 1 <= int(target.split()[2]) <= 5
      elif query.form in (queries.Form.VALUE, queries.Form.FIRST):
        kinds = [world.ATTRIBUTES[kind] for kind in (query.attribute, query.other) if kind]
        known = {value for kind in kinds for value in kind.values}
        known |= {"some", "something"} if query.form == queries.Form.FIRST else set()  # of an event without its value
        assert any(word in shown for word in known & set(target.rstrip(".").split()))
      else:
        assert target.rstrip(".").rsplit(" ", 1)[1] in {date for _, date in records}


def test_targets_agree_with_the_records_wherever_these_are_canonical():
  checked = 0
  for _, records, asked in EXAMPLES:
    facts = [(fact, date) for text, date in records if (fact := world.read_record(text)) is not None]
    if len(facts) < len(records):
      continue
    for question, target in asked:
      query = queries.read(question.text)
      assert query is not None
      assert target == queries.sentence(query, facts)
      checked += 1
  assert checked > 100


def test_questions_without_an_answer_are_never_answered_with_the_truth_of_another():
  for _, records, asked in EXAMPLES:
    if not records:
      assert {target for _, target in asked} <= {ABSTAIN}


def test_abstention_is_common_but_not_the_rule():
  targets = [target for *_, asked in EXAMPLES for _, target in asked]
  assert 0.25 < np.mean([target == ABSTAIN for target in targets]) < 0.45
  assert 0.02 < np.mean([not records for _, records, _ in EXAMPLES]) < 0.12


def test_gold_answers_are_mostly_kept():
  kept = [target == q.answers[1] for *_, asked in EXAMPLES for q, target in asked if q.answers]
  assert np.mean(kept) > 0.6


@pytest.mark.parametrize(
  ("text", "fact", "said"),
  [
    ("Ann lives Rome", ANN, True),
    ("Ann Rome.", ANN, True),
    ("lives in Rome", ANN, False),
    ("Ann lives in", ANN, False),
    ("Ann 34 old", Fact("Ann", "age", "34"), True),
    ("Ann is 34", Fact("Ann", "age", "34"), False),
    ("Ann ran 34", Fact("Ann", "run", "34"), False),
    ("Ann 34 km", Fact("Ann", "run", "34"), True),
  ],
)
def test_a_fact_follows_from_subject_value_and_unit(text: str, fact: Fact, said: bool):
  item = answering._Item(text, "2024-01-02", (fact,))
  assert bool(answering._still_said(item).facts) is said


def test_misworded_records_change_their_text_and_keep_a_date():
  rng = np.random.default_rng(0)
  spoilt = [answering._misword(rng, ITEM) for _ in range(200)]
  assert all(item.date == ITEM.date and item.text for item in spoilt)
  assert np.mean([item.text != ITEM.text for item in spoilt]) > 0.95
  assert 0.4 < np.mean([bool(item.facts) for item in spoilt]) < 0.9


def test_joined_records_keep_the_facts_of_both():
  other = answering._Item("Ann plays the harp", ITEM.date, (Fact("Ann", "instrument", "harp"),))
  later = answering._Item("Ann met Olga", "2024-05-05", (Fact("Ann", "meeting", "Olga"),))
  joined = answering._join(np.random.default_rng(0), [ITEM, other, later], 1.0)
  assert [item.facts for item in joined] == [ITEM.facts + other.facts, later.facts]
