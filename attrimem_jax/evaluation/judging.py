"""Judged scores of a benchmark: accuracy over what was judged, the rest apart, and how far the judge can be trusted.

The judge is any function from messages to texts. It is asked again where it gave no verdict, up to `tries` times. Its
recall and specificity come from a calibration set whose right labels are known: gold answers in other words, and the
same with names or numbers of another question in their place.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from attrimem_jax.evaluation import benchmark
from attrimem_jax.reward import judge, outcome
from attrimem_jax.types import Episode, Question

Complete = Callable[[Sequence[judge.Messages]], Sequence[str | None]]
"""Messages to what a model said of each; None where it said nothing (its endpoint failed)."""
COMPARABLE = 0.01  # a larger share of unjudged answers makes a run incomparable


@dataclasses.dataclass(frozen=True)
class Judged:
  """Verdicts by question id.

  Attributes:
    score: share of right answers of all questions but the unjudged ones; missing answers are wrong.
    verdicts: of each question that was judged or not answered.
    unjudged: ids for which the judge gave no verdict; they are in no mean.
    missing: ids of questions without an answer.
    comparable: whether no more than `COMPARABLE` of all questions went unjudged.
  """

  score: benchmark.Score
  verdicts: Mapping[str, bool]
  unjudged: tuple[str, ...]
  missing: tuple[str, ...]
  comparable: bool


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What a judge made of answers whose labels are known; NaN where none of a kind was judged."""

  recall: float  # share of right answers that it called correct
  specificity: float  # share of wrong answers that it called wrong
  right: int
  wrong: int
  unjudged: int


def judged(
  episodes: Sequence[Episode],
  answers: Mapping[str, str],
  complete: Complete,
  *,
  tries: int = 3,
  exclude: Mapping[str, str] | None = None,
  samples: int = 1000,
  confidence: float = 0.95,
) -> Judged:
  """Judges all answers.

  Args:
    episodes: the data set, or a split of it.
    answers: by question id.
    complete: the judge.
    tries: how often it is asked for a verdict.
    exclude: questions to leave out, {id: source that says why}, e.g. an audit of wrong gold.
    samples, confidence: of the bootstrap over conversations.

  Raises:
    ValueError: an excluded id is no question of the data, or has no source.
  """
  left_out = _checked_exclusions(episodes, exclude or {})
  asked = [(e.history.id, q) for e in episodes for q in e.questions if q.id not in left_out]
  given = [q for _, q in asked if q.id in answers]
  said = dict(
    zip([q.id for q in given], ask(complete, [judge.prompt(q, answers[q.id]) for q in given], tries), strict=True)
  )
  missing = tuple(q.id for _, q in asked if q.id not in answers)
  unjudged = tuple(i for i, v in said.items() if v is None)
  verdicts = {i: v for i, v in said.items() if v is not None} | dict.fromkeys(missing, False)
  scored = [(history, q) for history, q in asked if q.id in verdicts]
  score = benchmark.summed(scored, {q.id: float(verdicts[q.id]) for _, q in scored}, missing, samples, confidence)
  return Judged(score, verdicts, unjudged, missing, len(unjudged) <= COMPARABLE * len(asked))


def ask(complete: Complete, prompts: Sequence[judge.Messages], tries: int) -> list[bool | None]:
  """A verdict for each prompt; those without one are asked again."""
  found: list[bool | None] = [None] * len(prompts)
  for _ in range(tries):
    open_ = [i for i, v in enumerate(found) if v is None]
    if not open_:
      break
    for i, said in zip(open_, complete([prompts[i] for i in open_]), strict=True):
      found[i] = None if said is None else judge.verdict(said)
  return found


def calibration_set(questions: Sequence[Question], count: int, seed: int = 0) -> list[tuple[Question, str, bool]]:
  """(question, answer, whether it is right): for each of `count` questions one right and one planted wrong answer.

  Right: the gold in a sentence; a refusal where the question has none. Wrong: the gold with its numbers changed,
  the other one of yes and no, else the gold of another question, of the same kind where there is one.
  """
  usable = [q for q in questions if q.kind != "single-session-preference"]
  rng = np.random.default_rng(seed)
  chosen = [usable[i] for i in rng.permutation(len(usable))[:count]]
  rows: list[tuple[Question, str, bool]] = []
  for q in chosen:
    foreign = [o for o in usable if o.answers and o.text != q.text and not _alike(o, q)]
    others = [o for o in foreign if o.kind == q.kind] or foreign
    if not others:
      continue
    other = _bare(others[rng.integers(len(others))].answers[0])
    if q.abstain:
      rows += [(q, "That was never told in our conversations.", True), (q, f"It is {other}.", False)]
    else:
      rows += [(q, _FRAMES[rng.integers(len(_FRAMES))].format(_bare(q.answers[0])), True)]
      rows += [(q, f"I think it was {_swapped(_bare(q.answers[0]), other)}.", False)]
  return rows


def calibrate(complete: Complete, rows: Sequence[tuple[Question, str, bool]], tries: int = 3) -> Calibration:
  """Recall and specificity of a judge on answers with known labels."""
  verdicts = ask(complete, [judge.prompt(q, answer) for q, answer, _ in rows], tries)
  pairs = [(v, label) for v, (_, _, label) in zip(verdicts, rows, strict=True) if v is not None]
  right, wrong = ([v for v, label in pairs if label is wanted] for wanted in (True, False))
  recall = float(np.mean(right)) if right else float("nan")
  specificity = 1 - float(np.mean(wrong)) if wrong else float("nan")
  return Calibration(recall, specificity, len(right), len(wrong), len(rows) - len(pairs))


_FRAMES = ("From what was said: {}.", "As far as I remember, the answer is {}.", "{} (that is what the talk says)")
_DIGITS = re.compile(r"\d+")


def _bare(gold: str) -> str:
  """Without a full stop at its end, which would stand doubled in a sentence."""
  return gold.strip().removesuffix(".")


def _swapped(gold: str, other: str) -> str:
  """The gold with every number made larger by more than the rubrics forgive; yes for no; else the other's gold."""
  turned = {"yes": "No", "no": "Yes"}.get(gold.lower())
  if turned is not None:
    return turned
  return _DIGITS.sub(lambda m: str(int(m[0]) + 7), gold) if _DIGITS.search(gold) else other


def _alike(a: Question, b: Question) -> bool:
  return any(outcome.token_f1(x, y) > 0 for x in a.answers for y in b.answers)


def _checked_exclusions(episodes: Sequence[Episode], exclude: Mapping[str, str]) -> set[str]:
  known = {question.id for episode in episodes for question in episode.questions}
  for name, source in exclude.items():
    if name not in known:
      raise ValueError(f"excluded question {name!r} is none of the data: correct its id")
    if not isinstance(source, str) or not source.strip():
      raise ValueError(f"excluded question {name!r} has no source: say who found what wrong with it")
  return set(exclude)
