"""Scores of a benchmark's answers over the whole data set: a missing answer is wrong and listed, none is ignored.

`locomo_f1` is the score that LoCoMo publishes (Maharana et al. 2024, task_eval/evaluation.py), quirks included, for
comparison with published numbers alone: gold answers of multi-hop questions are split at commas, so that "7 May, 2023"
becomes two answers; only what follows no semicolon counts of an open-domain gold; "and" is an article; words are
stemmed; punctuation beyond ASCII stays; an adversarial question is right where one of two phrases stands in the answer.
`reward.outcome` has the clean measures: token F1, exact match and containment.
"""

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Callable, Mapping, Sequence

from attrimem_jax.evaluation.bootstrap import Interval, mean_interval
from attrimem_jax.reward import outcome
from attrimem_jax.types import Episode, Question

OFFICIAL = "locomo_f1"
MEASURES = (OFFICIAL, *outcome.KINDS)
REFUSALS = ("no information available", "not mentioned")

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the|and)\b")


@dataclasses.dataclass(frozen=True)
class Score:
  """Means with their intervals over all questions, those to be answered, those to abstain from, and each kind.

  Attributes:
    overall, answerable, abstention: each with its own denominator; NaN where there is no such question.
    kinds: by kind of question.
    counts: questions of each kind, which are those of the data set.
    scores: of each question in [0, 1], by its id.
    missing: ids of questions without an answer, scored 0.
  """

  overall: Interval
  answerable: Interval
  abstention: Interval
  kinds: Mapping[str, Interval]
  counts: Mapping[str, int]
  scores: Mapping[str, float]
  missing: tuple[str, ...]


def score(
  episodes: Sequence[Episode],
  answers: Mapping[str, str],
  measure: str,
  *,
  samples: int = 1000,
  confidence: float = 0.95,
) -> Score:
  """Scores the answers to all questions of the episodes.

  Args:
    episodes: the data set, or a split of it.
    answers: by question id; "" is an answer, and wrong.
    measure: one of `MEASURES`. LoCoMo's is defined on its own kinds of questions alone.
    samples, confidence: of the bootstrap over conversations.

  Raises:
    ValueError: the measure is unknown or not defined on a question, or an answer is to no question of the data.
  """
  if measure not in MEASURES:
    raise ValueError(f"measure is {measure!r}: use one of {', '.join(MEASURES)}")
  questions = [(episode.history.id, question) for episode in episodes for question in episode.questions]
  strangers = sorted(answers.keys() - {question.id for _, question in questions})
  if strangers:
    raise ValueError(f"{len(strangers)} answers are to no question of the data, the first to {strangers[0]!r}")
  scores = {q.id: _measured(answers[q.id], q, measure) if q.id in answers else 0.0 for _, q in questions}
  if len(scores) < len(questions):
    raise ValueError("two questions of the data have the same id: give the episodes of one benchmark, each once")
  missing = tuple(q.id for _, q in questions if q.id not in answers)
  return summed(questions, scores, missing, samples, confidence)


def summed(
  questions: Sequence[tuple[str, Question]],
  scores: Mapping[str, float],
  missing: tuple[str, ...],
  samples: int,
  confidence: float,
) -> Score:
  """Means and intervals of given scores.

  Args:
    questions: (history id, question) of all that count.
    scores: of each of them.
    missing: ids of those without an answer.
    samples, confidence: of the bootstrap over conversations.
  """

  def interval(some: Sequence[tuple[str, Question]]) -> Interval:
    clusters = [history for history, _ in some]
    return mean_interval([scores[q.id] for _, q in some], clusters=clusters, samples=samples, confidence=confidence)

  counts = collections.Counter(question.kind for _, question in questions)
  return Score(
    overall=interval(questions),
    answerable=interval([(history, q) for history, q in questions if not _to_refuse(q)]),
    abstention=interval([(history, q) for history, q in questions if _to_refuse(q)]),
    kinds={kind: interval([(history, q) for history, q in questions if q.kind == kind]) for kind in sorted(counts)},
    counts=dict(sorted(counts.items())),
    scores=scores,
    missing=missing,
  )


def locomo_f1(text: str, gold: str, kind: str) -> float:
  """LoCoMo's published score of an answer in [0, 1].

  Args:
    text: the answer.
    gold: the gold answer; not looked at for adversarial questions.
    kind: of the question, in LoCoMo's words.

  Raises:
    ValueError: LoCoMo has no such kind.
    ImportError: nltk, whose Porter stemmer the score is defined by, is not installed.
  """
  if kind == "adversarial":
    return float(any(phrase in text.lower() for phrase in REFUSALS))
  if kind == "multi-hop":
    parts, golds = ([part.strip() for part in whole.split(",")] for whole in (text, gold))
    return sum(max(_stemmed_f1(part, one) for part in parts) for one in golds) / len(golds)
  if kind == "open-domain":
    return _stemmed_f1(text, gold.split(";")[0].strip())
  if kind in ("temporal", "single-hop"):
    return _stemmed_f1(text, gold)
  raise ValueError(f"{OFFICIAL} is not defined on questions of kind {kind!r}: use another measure")


def _measured(text: str, question: Question, measure: str) -> float:
  if measure != OFFICIAL:
    return outcome.outcome(text, question, measure)
  return max(locomo_f1(text, gold, question.kind) for gold in question.answers or ("",))


def _to_refuse(question: Question) -> bool:
  """Adversarial questions stand apart even where two of them have an answer, as in published tables."""
  return question.abstain or question.kind == "adversarial"


def _stemmed_f1(text: str, gold: str) -> float:
  got, wanted = (list(map(_stem(), _normalised(part).split())) for part in (text, gold))
  common = (collections.Counter(got) & collections.Counter(wanted)).total()
  if not common:
    return 0.0
  precision, recall = common / len(got), common / len(wanted)
  return 2 * precision * recall / (precision + recall)


def _normalised(text: str) -> str:
  return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION))


@functools.cache
def _stem() -> Callable[[str], str]:
  try:
    from nltk.stem.porter import PorterStemmer
  except ImportError as error:
    raise ImportError(f'{OFFICIAL} needs nltk for its stemmer: pip install "attrimem-jax[bench]"') from error
  stem: Callable[[str], str] = PorterStemmer().stem
  return stem
