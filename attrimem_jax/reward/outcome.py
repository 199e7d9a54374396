"""Whether an answer is right: exact match, token F1 or containment, each against every accepted gold answer.

All three compare words and never raw characters, so the gold "12" is not found in "120", nor "no" in "know". Chinese,
Japanese and Korean are written without spaces, or with endings joined on, and count by character; a number written in
Chinese numerals stays one word. Left out on purpose: synonyms, word forms, dates in another order ("May 7" and "7 May")
and negation ("not Paris" contains "Paris"). Those need a judge.
"""

import re
import unicodedata
from collections import Counter

from attrimem_jax.types import Question

KINDS = ("contains", "f1", "exact")

_APOSTROPHES = "'\u2019\u02bc\u2018`\u00b4"
# A comma that groups thousands goes, so that "1,000" is "1000"; the comma of "May 7,2023" separates words.
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POSSESSIVE = re.compile(rf"(?<=\w)[{_APOSTROPHES}][sS](?!\w)")
# "A" within a text is a name ("Vitamin A tablets"), "a" is an article; at the end of a text neither has a noun.
_ARTICLE = re.compile(r"(?:(?<!\S)(?:[Tt]he|THE|[Aa]n|AN|a)|^A)(?=\s\S)")
_NUMERALS = "〇零一二三四五六七八九十百千万萬億亿两兩"
# Han with its extensions, kana, Hangul: a character is a word.
_CHARACTERS = "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_NUMERALS}]+|[{_CHARACTERS}]|[^\s{_CHARACTERS}]+")

# Said anywhere in an answer, these make it an abstention, even where a guess follows.
_PHRASES = (
  "I do not know",
  "I don't know",
  "do not have enough information",
  "don't have enough information",
  "do not have any information",
  "don't have any information",
  "not answerable",
  "cannot be answered",
  "can't be answered",
  "cannot answer",
  "can't answer",
  "cannot be determined",
  "can't be determined",
  "cannot determine",
  "no information",
  "not enough information",
  "insufficient information",
  "not mentioned",
  "not specified",
  "not stated",
  "not provided",
  "no mention of",
  "no record of",
  "不知道",
  "无法回答",
  "没有提到",
  "没有提及",
  "未提及",
  "没有相关信息",
)
# Too short to be looked for inside an answer (a film may be called "Unknown"): these must be all of it.
_WHOLE = ("unknown", "unanswerable", "not known", "no idea", "not sure", "I am not sure", "I'm not sure", "N/A", "未知")


def normalise(text: str) -> str:
  """Lower case, without punctuation, articles and possessive endings; words separated by one space.

  "The café's  1,000 guests!" → "café 1000 guests". A point or colon between digits stays ("3.5", "10:30"). A text of
  nothing but punctuation is kept as it is, so that no two of them become equal by being empty.
  """
  text = unicodedata.normalize("NFKC", text)
  text = _POSSESSIVE.sub("", _THOUSANDS.sub("", text))
  spaced = "".join(_keep(text, i) for i in range(len(text)))
  words = " ".join(_ARTICLE.sub(" ", " ".join(spaced.split())).split())
  return (words or " ".join(text.split())).casefold()


def _keep(text: str, i: int) -> str:
  char = text[i]
  # Marks belong to their letter: without them Hindi and Thai words would fall apart.
  if unicodedata.category(char)[0] in "LMN":
    return char
  if char in ".:" and text[i - 1 : i].isdigit() and text[i + 1 : i + 2].isdigit():
    return char
  return "" if char in _APOSTROPHES else " "


def words(text: str) -> list[str]:
  """The words of a text after `normalise`, in order; CJK by character."""
  return _WORD.findall(normalise(text))


def exact_match(text: str, gold: str) -> float:
  """1.0 where both have the same words in the same order, else 0.0. An empty gold answer matches nothing."""
  wanted = words(gold)
  return float(bool(wanted) and words(text) == wanted)


def token_f1(text: str, gold: str) -> float:
  """Harmonic mean of precision and recall over the two bags of words (SQuAD; Rajpurkar et al. 2016), in [0, 1]."""
  got, wanted = words(text), words(gold)
  common = (Counter(got) & Counter(wanted)).total()
  return 2.0 * common / (len(got) + len(wanted)) if common else 0.0


def contains(text: str, gold: str) -> float:
  """1.0 where the gold words stand in the text, side by side and in order, else 0.0."""
  return float(_contains(words(text), words(gold)))


def _contains(got: list[str], wanted: list[str]) -> bool:
  if not wanted:
    return False
  return any(got[i : i + len(wanted)] == wanted for i in range(len(got) - len(wanted) + 1))


_PHRASE_WORDS = tuple(words(phrase) for phrase in _PHRASES)
_WHOLE_WORDS = tuple(words(phrase) for phrase in _WHOLE)


def abstained(text: str) -> bool:
  """Whether an answer declines to answer. An empty answer does not: saying nothing is a failure, not a decision."""
  got = words(text)
  return got in _WHOLE_WORDS or any(_contains(got, phrase) for phrase in _PHRASE_WORDS)


def outcome(text: str, question: Question, kind: str) -> float:
  """The score of an answer in [0, 1]: the best over all gold answers.

  A question without a gold answer is right exactly where the answer abstains; any other is never right by abstaining.

  Args:
    text: the answer.
    question: with its gold answers.
    kind: "contains", "f1" or "exact".

  Raises:
    ValueError: `kind` is another word.
  """
  measures = {"contains": contains, "f1": token_f1, "exact": exact_match}
  if kind not in measures:
    raise ValueError(f"reward.outcome: kind {kind!r} is unknown; choose one of {', '.join(KINDS)}")
  if question.abstain:
    return float(abstained(text))
  if abstained(text):
    return 0.0
  return max(measures[kind](text, gold) for gold in question.answers)
