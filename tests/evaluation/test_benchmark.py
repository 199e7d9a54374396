"""LoCoMo's published score against an independent implementation and by hand; denominators that are the data set."""

import math
import re

import pytest

from attrimem_jax.evaluation import benchmark
from attrimem_jax.types import Episode, History, Question

porter = pytest.importorskip("nltk.stem.porter", reason="LoCoMo's score is defined by nltk's stemmer")

# (kind, gold, answer, score worked by hand)
TRICKY = [
  ("single-hop", "Oslo", "oslo.", 1.0),
  ("single-hop", "Oslo", "", 0.0),
  ("single-hop", "the", "the", 0.0),  # nothing but articles: no word in common
  ("single-hop", "...", "...", 0.0),
  ("single-hop", "Oslo", "It is Oslo", 0.5),  # 1 of 3 and 1 of 1
  ("single-hop", "painting", "paints", 1.0),  # both stem to "paint"
  ("single-hop", "salt and pepper", "salt pepper", 1.0),  # "and" is an article
  ("single-hop", "1,000 guests", "1000 guests", 1.0),
  ("single-hop", "Ann's dog", "Anns dog", 1.0),
  ("single-hop", "Ann\u2019s dog", "Ann's dog", 0.5),  # a curly apostrophe is no punctuation here
  ("single-hop", "twenty-one", "twentyone", 1.0),
  ("single-hop", "dog dog cat", "dog", 0.5),  # a bag: one dog of three words
  ("single-hop", "red, blue", "blue", 2 / 3),  # not split: 1 of 1 and 1 of 2
  ("single-hop", "A\u00a0b", "b", 1.0),  # no-break space separates, the article goes
  ("temporal", "7 May 2023", "May 7, 2023", 1.0),
  ("temporal", "7 May 2023", "7 May", 0.8),
  ("temporal", "Not mentioned", "not mentioned", 1.0),
  ("multi-hop", "red, blue", "blue", 0.5),  # split: blue is there, red is not
  ("multi-hop", "red, blue", "blue, red", 1.0),
  ("multi-hop", "7 May, 2023", "7 May 2023", (0.8 + 0.5) / 2),  # a date becomes two answers
  ("multi-hop", "7 May, 2023", "7 May, 2023", 1.0),
  ("multi-hop", "red,", "red", 0.5),  # what follows a last comma is an answer that nothing matches
  ("multi-hop", "red", "red, green, blue", 1.0),  # more answers cost nothing
  ("open-domain", "yes; she said so", "yes", 1.0),
  ("open-domain", "yes; she said so", "she said so", 0.0),
  ("open-domain", "; yes", "yes", 0.0),
  ("single-hop", "yes; no", "yes", 2 / 3),
  ("adversarial", "", "Not Mentioned in the talk", 1.0),
  ("adversarial", "", "There is no information available.", 1.0),
  ("adversarial", "", "I do not know", 0.0),
  ("adversarial", "", "", 0.0),
  ("adversarial", "No", "No", 0.0),  # the two that have an answer are scored alike
]


def _words(text):
  """The words of a text by the published definition, character by character."""
  kept = "".join(char for char in text.replace(",", "").lower() if char not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
  words = re.split(r"\W+|\b", " ".join(w for w in kept.split()))
  if any(ord(char) > 127 for char in kept):  # \b falls within words that hold such characters: leave them whole
    words = kept.split()
  return [porter.PorterStemmer().stem(word) for word in words if word and word not in ("a", "an", "the", "and")]


def _overlap(answer, gold):
  got, wanted = _words(answer), _words(gold)
  left, same = list(wanted), 0
  for word in got:
    if word in left:
      left.remove(word)
      same += 1
  return 0.0 if same == 0 else 2 * same / (len(got) + len(wanted))


def _independent(kind, gold, answer):
  if kind == "adversarial":
    lowered = answer.casefold()
    return 1.0 if lowered.find("no information available") >= 0 or lowered.find("not mentioned") >= 0 else 0.0
  if kind == "multi-hop":
    best = []
    for one in gold.split(","):
      best.append(max(_overlap(part, one) for part in answer.split(",")))
    return math.fsum(best) / len(best)
  return _overlap(answer, gold.partition(";")[0] if kind == "open-domain" else gold)


@pytest.mark.parametrize(("kind", "gold", "answer", "expected"), TRICKY)
def test_locomo_f1_of_tricky_cases(kind, gold, answer, expected):
  assert benchmark.locomo_f1(answer, gold, kind) == pytest.approx(expected, abs=1e-12)
  assert _independent(kind, gold, answer) == pytest.approx(expected, abs=1e-12)


def test_every_answer_of_the_table_against_every_gold_of_it():
  kinds = sorted({kind for kind, *_ in TRICKY})
  golds, answers = ({row[i] for row in TRICKY if row[1].isascii() and row[2].isascii()} for i in (1, 2))
  for kind in kinds:
    for gold in golds:
      for answer in answers:
        expected = _independent(kind, gold, answer)
        assert benchmark.locomo_f1(answer, gold, kind) == pytest.approx(expected, abs=1e-12), (kind, gold, answer)


def test_locomo_f1_is_not_defined_on_other_kinds():
  with pytest.raises(ValueError, match="not defined on questions of kind 'temporal-reasoning'"):
    benchmark.locomo_f1("a", "b", "temporal-reasoning")


def _episodes():
  return [
    Episode(
      History(name, ()),
      (
        Question(f"{name}1", "Where?", ("Oslo", "Norway"), "single-hop"),
        Question(f"{name}2", "When?", ("May",), "temporal"),
        Question(f"{name}3", "Why?", (), "adversarial"),
        Question(f"{name}4", "Is it?", ("No",), "adversarial"),
      ),
    )
    for name in "ab"
  ]


def test_the_denominator_is_the_data_set():
  answers = {"a1": "Norway", "a2": "June", "a3": "Not mentioned.", "a4": "not mentioned", "b1": ""}
  found = benchmark.score(_episodes(), answers, "locomo_f1", samples=50)
  assert found.missing == ("b2", "b3", "b4")
  assert found.scores == {"a1": 1.0, "a2": 0.0, "a3": 1.0, "a4": 1.0, "b1": 0.0, "b2": 0.0, "b3": 0.0, "b4": 0.0}
  assert found.counts == {"adversarial": 4, "single-hop": 2, "temporal": 2}
  assert (found.overall.mean, found.answerable.mean, found.abstention.mean) == (3 / 8, 1 / 4, 2 / 4)
  assert {kind: interval.mean for kind, interval in found.kinds.items()} == {
    "adversarial": 0.5,
    "single-hop": 0.5,
    "temporal": 0.0,
  }
  assert found.overall.low <= found.overall.mean <= found.overall.high


@pytest.mark.parametrize(
  ("measure", "expected"), [("f1", [2 / 3, 0.0, 1.0, 0.0]), ("contains", [1.0, 0.0, 1.0, 0.0]), ("exact", [0, 0, 1, 0])]
)
def test_the_clean_measures(measure, expected):
  """A refusal is right where there is no gold, and wrong where there is one: a4 has the answer "No"."""
  answers = {"a1": "In Norway", "a2": "June", "a3": "I don't know", "a4": "Not mentioned"}
  found = benchmark.score(_episodes(), answers, measure, samples=10)
  assert [found.scores[f"a{i}"] for i in (1, 2, 3, 4)] == pytest.approx(expected)


def test_what_cannot_be_scored_is_refused():
  with pytest.raises(ValueError, match="measure is 'bleu': use one of locomo_f1, contains, f1, exact"):
    benchmark.score(_episodes(), {}, "bleu")
  with pytest.raises(ValueError, match="1 answers are to no question of the data, the first to 'z9'"):
    benchmark.score(_episodes(), {"z9": "Oslo"}, "f1")
  with pytest.raises(ValueError, match="the same id"):
    benchmark.score(_episodes() * 2, {}, "f1")


def test_no_questions_give_no_number():
  found = benchmark.score([], {}, "f1")
  assert math.isnan(found.overall.mean)
  assert found.missing == ()
