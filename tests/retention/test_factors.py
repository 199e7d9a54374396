import inspect

import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity

from attrimem_jax.retention import factors
from attrimem_jax.retention.factors import FACTORS, Known, Lexical, blind, by_speaker, oracle
from attrimem_jax.types import Question


def _known(**changes):
  users = np.array([True, False, True, False])
  given = {
    "texts": ("I love my old cello", "Cellos are string instruments", "My flight is on Friday", ""),
    "reliability": by_speaker(users),
    "by_user": users,
    "session": np.array([0, 0, 1, 1]),
    "age": np.array([3.0, 3.0, np.nan, -1.0]),
    "retrieved": np.array([0, 1, 3, 0]),
    "credit": np.array([0.0, -2.0, 1.0, 0.0]),
  }
  return Known(**given | changes)


def _column(table, name):
  return table[:, FACTORS.index(name)]


def test_each_factor_is_what_its_formula_says():
  table = blind(_known(profile="plays the cello"), Lexical()).values
  assert table.shape == (4, 7)
  assert table.min() >= 0
  assert table.max() <= 1
  np.testing.assert_allclose(_column(table, "usage"), [0, 0.5, 0.75, 0])
  np.testing.assert_allclose(_column(table, "utility"), [0, 0, 0.5, 0])
  np.testing.assert_allclose(_column(table, "reliability"), [0.7, 0.4, 0.7, 0.4])
  emotion = _column(table, "emotion")
  assert emotion[0] == pytest.approx(0.2 / 3 * (0.5 + 0.15 / 3))  # "love" once
  np.testing.assert_array_equal(emotion[1:], 0)
  alignment = _column(table, "alignment")
  assert alignment[0] > 0.5
  assert alignment[2] == pytest.approx(0.5)  # no word in common


def test_similarities_are_those_of_scikit_learn():
  rng = np.random.default_rng(0)
  vectors = rng.normal(size=(6, 5))
  users, session = np.array([1, 0, 1, 0, 0, 1], bool), np.array([0, 0, 0, 2, 2, 5])
  goals = factors.session_goals(vectors, users, session)
  mean = vectors[[0, 2, 5]].mean(axis=0)
  expected = np.stack([*[vectors[[0, 2]].mean(axis=0)] * 3, mean, mean, vectors[5]])  # session 2 has no user
  np.testing.assert_allclose(goals, expected)
  got = factors.similarity(vectors, goals)
  np.testing.assert_allclose(got, (1 + np.diag(cosine_similarity(vectors, expected))) / 2, rtol=1e-6)


def test_the_oracle_prefers_what_the_question_asks_for_and_changes_nothing_else():
  known = _known()
  question = Question("q", "When is my flight?", (), "temporal")
  told, plain = oracle(known, question, Lexical()).values, blind(known, Lexical()).values
  assert _column(told, "goal").argmax() == 2
  others = [i for i, name in enumerate(FACTORS) if name != "goal"]
  np.testing.assert_array_equal(told[:, others], plain[:, others])


def test_a_blind_policy_has_no_way_to_be_given_a_question():
  assert list(inspect.signature(blind).parameters) == ["known", "encoder"]
  assert not any(field in Known.__dataclass_fields__ for field in ("question", "goal", "answer", "gold"))


def test_feeling_is_read_in_english_and_chinese_and_is_bounded():
  plain, mild, strong, chinese, loud = factors.emotion(
    ["The train left", "I am happy", "I am devastated!!!", "我很难过", "love hate death panic awful " * 9 + "!!!!"]
  )
  assert plain == 0
  assert 0 < mild < strong < loud
  assert chinese == pytest.approx(mild)
  assert loud == pytest.approx(0.4 * (0.5 + 0.3))


def test_an_empty_memory_has_no_rows_and_a_blank_profile_no_alignment():
  none = np.zeros(0)
  known = Known((), none, none.astype(bool), none.astype(int), none, none, none)
  assert blind(known, Lexical()).values.shape == (0, 7)
  np.testing.assert_array_equal(_column(blind(_known(profile=" \n"), Lexical()).values, "alignment"), 0)


def test_what_does_not_fit_is_refused():
  with pytest.raises(ValueError, match="reliability has shape"):
    _known(reliability=np.ones(3))
  with pytest.raises(ValueError, match="credit of memory 1"):
    _known(credit=np.array([0, np.nan, 0, 0]))


def test_vectors_do_not_depend_on_what_the_encoder_saw_before():
  used = Lexical()
  used(["something else altogether"])
  np.testing.assert_array_equal(used(["a b", "b c"])(["b"]), Lexical()(["a b", "b c"])(["b"]))
