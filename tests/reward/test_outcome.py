"""Scores of answers: tables of cases where careless string matching goes wrong."""

import pytest

from attrimem_jax.reward.outcome import abstained, contains, exact_match, normalise, outcome, token_f1, words
from attrimem_jax.types import Question


def question(*answers):
  return Question("q", "Where?", answers, "fact")


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("The café's  1,000 guests!", "café 1000 guests"),
    ("May 7,2023", "may 7 2023"),
    ("It took 3.5 hours, from 10:30.", "it took 3.5 hours from 10:30"),
    ("Vitamin A", "vitamin a"),
    ("some Vitamin A tablets", "some vitamin a tablets"),
    ("A dog", "dog"),
    ("a", "a"),
    ("I don’t know", "i dont know"),
    ("“Ｆｕｌｌ” — width…", "full width"),
    ("हिन्दी।", "हिन्दी"),
    ("?!", "?!"),
    ("", ""),
  ],
)
def test_normalise(text, expected):
  assert normalise(text) == expected


@pytest.mark.parametrize(
  ("text", "gold", "found"),
  [
    ("It costs 120 euros.", "12", 0),
    ("It costs 12 euros.", "12", 1),
    ("It costs 12.5 euros", "12", 0),
    ("I know him", "no", 0),
    ("No, he did not.", "no", 1),
    ("At John’s house", "John", 1),
    ("He lives in «Paris».", "Paris", 1),
    ("She moved to new york city", "the New York City", 1),
    ("York New", "New York", 0),
    ("Vitamin D", "Vitamin A", 0),
    ("他住在北京。", "北京", 1),
    ("他有三十只猫", "三", 0),
    ("他有三只猫", "三", 1),
    ("12月", "12", 1),
    ("112月", "12", 0),
    ("anything", "", 0),
    ("really?", "?", 0),
    ("", "Paris", 0),
  ],
)
def test_contains_respects_the_bounds_of_words(text, gold, found):
  assert contains(text, gold) == found


def test_exact_match():
  assert exact_match("The red car.", "red car") == 1
  assert exact_match("A red car there", "red car") == 0
  assert exact_match("", "") == 0


@pytest.mark.parametrize(
  ("text", "gold", "expected"),
  [
    ("the red car", "a blue car", 0.5),  # one common word of two and two
    ("car car", "car", 2 / 3),  # a repeated word counts once
    ("北京市", "北京", 0.8),  # 2 · 2 / (3 + 2)
    ("", "car", 0.0),
    ("", "", 0.0),
  ],
)
def test_token_f1_by_hand(text, gold, expected):
  assert token_f1(text, gold) == pytest.approx(expected, abs=1e-12)


def test_words_of_mixed_scripts():
  assert words("iPhone12在北京") == ["iphone12", "在", "北", "京"]


@pytest.mark.parametrize(
  "text",
  [
    "I do not know.",
    "I DON’T KNOW",
    "The question is not answerable.",
    "There is no information about that.",
    "Unknown",
    "N/A",
    "对不起，我不知道。",
    "It is not mentioned in the conversation.",
  ],
)
def test_abstained(text):
  assert abstained(text)


@pytest.mark.parametrize("text", ["", "Paris", "The film Unknown", "I know", "She knows no one", "informational"])
def test_not_abstained(text):
  assert not abstained(text)


def test_outcome_takes_the_best_gold_answer():
  assert outcome("in Rome", question("Paris", "Rome"), "contains") == 1
  assert outcome("in Rome", question("Paris", "Rome"), "exact") == 0
  assert outcome("in Rome", question("Paris", "Rome"), "f1") == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["contains", "f1", "exact"])
def test_abstaining_is_right_exactly_where_there_is_no_answer(kind):
  assert outcome("I do not know.", question(), kind) == 1
  assert outcome("Paris", question(), kind) == 0
  assert outcome("", question(), kind) == 0
  assert outcome("I do not know, perhaps Paris", question("Paris", "I do not know"), kind) == 0


def test_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="'judge' is unknown; choose one of contains, f1, exact"):
    outcome("x", question("x"), "judge")
