"""The seven factors of a memory's value (arXiv 2606.12945), each from what is known when memory is consolidated.

The published form fills four of them without calling a model; value alignment, task utility and usage are zero there.
Here they read a profile, past attributions and an access log, and stay zero where there is none. Left out: the
published list of emotion rules, for which a short lexicon of English and Chinese stands.

`Known` holds no question, and `blind` takes nothing else: a blind policy cannot see what will be asked. `oracle` takes
the question as well, and gives another type, so that the two are never mixed up.
"""

import collections
import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from attrimem_jax.memory.retrieval import words
from attrimem_jax.types import Question

FACTORS = ("emotion", "goal", "alignment", "self", "utility", "reliability", "usage")

Encoder = Callable[[Sequence[str]], Callable[[Sequence[str]], np.ndarray]]
"""Fits to the texts of a memory and returns what turns texts into unit vectors, float32 [n, D] (zero for no words)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
  """Memories and what is known about them when it is decided which to keep.

  Attributes:
    texts: [n].
    reliability: float [n] in [0, 1]: how far the source is to be trusted. `by_speaker` gives the published values.
    by_user: bool [n], whether the user said it. Their mean vector stands for the user.
    session: int [n], which sitting it comes from; those of the user in the same one stand for its goal.
    age: float [n], days since it was written; NaN where no date is known, negative where the date lies ahead.
    retrieved: int [n], how often it was read to answer (access log).
    credit: float [n], how much past answers leaned on it, as summed attributions; what hurt counts as none.
    profile: what is known of the user's values and aims (core memory), "" if nothing.
  """

  texts: tuple[str, ...]
  reliability: np.ndarray
  by_user: np.ndarray
  session: np.ndarray
  age: np.ndarray
  retrieved: np.ndarray
  credit: np.ndarray
  profile: str = ""

  def __post_init__(self):
    for name in ("reliability", "by_user", "session", "age", "retrieved", "credit"):
      shape = np.shape(getattr(self, name))
      if shape != (len(self.texts),):
        raise ValueError(f"{name} has shape {shape} for {len(self.texts)} texts: give one number per text")
    for name in ("reliability", "retrieved", "credit"):
      bad = np.flatnonzero(~np.isfinite(getattr(self, name)))
      if bad.size:
        raise ValueError(f"{name} of memory {bad[0]} is not finite: give 0 where nothing is known")


@dataclasses.dataclass(frozen=True, eq=False)
class Blind:
  """Factors of a policy that knows no question: float32 [n, 7] in [0, 1], columns as `FACTORS`."""

  values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle:
  """Factors of a policy that was told the question: an upper bound, of no use for a memory. Shaped as `Blind`."""

  values: np.ndarray


def blind(known: Known, encoder: Encoder) -> Blind:
  """The factors, with what the user spoke of in the same session as the goal (all that the user said where nothing)."""
  embed = encoder(known.texts)
  vectors = embed(known.texts)
  return Blind(_all(known, embed, vectors, session_goals(vectors, known.by_user, known.session)))


def oracle(known: Known, question: Question, encoder: Encoder) -> Oracle:
  """The factors, with the question that will be asked as the goal."""
  embed = encoder(known.texts)
  goal = np.broadcast_to(embed([question.text]), (len(known.texts), embed([""]).shape[1]))
  return Oracle(_all(known, embed, embed(known.texts), goal))


def _all(
  known: Known, embed: Callable[[Sequence[str]], np.ndarray], vectors: np.ndarray, goals: np.ndarray
) -> np.ndarray:
  if not known.texts:
    return np.zeros((0, len(FACTORS)), np.float32)
  columns = (
    emotion(known.texts),
    similarity(vectors, goals),
    similarity(vectors, embed([known.profile])) if known.profile.strip() else np.zeros(len(vectors)),
    similarity(vectors, user_vector(vectors, known.by_user)[None]),
    utility(known.credit),
    np.clip(known.reliability, 0, 1),
    usage(known.retrieved),
  )
  return np.stack(columns, axis=1).astype(np.float32)


def similarity(vectors: np.ndarray, goals: np.ndarray) -> np.ndarray:
  """(1 + cos) / 2 of [n, D] with [n, D] or [1, D]: float [n]; 0.5 where a vector is zero."""
  norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(goals, axis=1)
  cosine = (vectors * goals).sum(axis=1) / np.where(norms > 0, norms, 1)
  return np.clip((1 + cosine) / 2, 0, 1)


def user_vector(vectors: np.ndarray, by_user: np.ndarray) -> np.ndarray:
  """The mean of what the user said, [D]; zero where nothing was."""
  return vectors[by_user].mean(axis=0) if by_user.any() else np.zeros(vectors.shape[1], vectors.dtype)


def session_goals(vectors: np.ndarray, by_user: np.ndarray, session: np.ndarray) -> np.ndarray:
  """Per memory the mean of what the user said in its session, [n, D]; of all where the user said nothing there."""
  _, index = np.unique(session, return_inverse=True)
  sums = np.zeros((index.max(initial=-1) + 1, vectors.shape[1]), vectors.dtype)
  np.add.at(sums, index[by_user], vectors[by_user])
  counts = np.bincount(index[by_user], minlength=len(sums))[:, None]
  return np.where(counts > 0, sums / np.maximum(counts, 1), user_vector(vectors, by_user))[index]


def by_speaker(by_user: np.ndarray) -> np.ndarray:
  """Reliability as published: 0.7 for what the user said, 0.4 for what the assistant did."""
  return np.where(by_user, 0.7, 0.4)


def utility(credit: np.ndarray) -> np.ndarray:
  """c / (1 + c) of the non-negative credit: half for one unit of log-odds that an answer owed to the memory."""
  return usage(np.maximum(credit, 0))


def usage(retrieved: np.ndarray) -> np.ndarray:
  """r / (1 + r) of the number of retrievals."""
  return retrieved / (1.0 + retrieved)


_STRONG = """
  love hate adore thrilled furious terrified devastated heartbroken ecstatic amazing terrible horrible awful excited
  panic desperate wonderful died death married divorce pregnant cancer accident
  爱 恨 激动 愤怒 崩溃 绝望 去世 结婚 离婚 怀孕 癌症 车祸
"""
_MILD = """
  happy sad glad sorry worried proud afraid angry upset stressed nervous lonely enjoy enjoyed favorite like liked hope
  tired miss grateful thanks thank frustrated disappointed struggling
  高兴 难过 担心 骄傲 害怕 生气 压力 紧张 孤独 喜欢 希望 感谢 失望
"""
_WORDS = {**dict.fromkeys(_MILD.split(), (0.1, 0.05)), **dict.fromkeys(_STRONG.split(), (0.2, 0.15))}
_LETTERS = {word: change for word, change in _WORDS.items() if word.isascii()}
_CHARACTERS = {word: change for word, change in _WORDS.items() if not word.isascii()}
_MOST_VALENCE, _MOST_AROUSAL = 0.4, 0.3


def emotion(texts: Sequence[str]) -> np.ndarray:
  """|dV| (0.5 + dA) in [0, 1], float [n]: words of feeling add to valence and arousal, exclamation marks to arousal.

  A cue counts three times at most; the published caps hold (0.4 and 0.3), so the factor is at most 0.32.
  """
  return np.array([_emotion(text) for text in texts], np.float64)


def _emotion(text: str) -> float:
  counts = collections.Counter(re.findall(r"[a-z]+", text.casefold()))
  found = [(min(counts[word], 3), _LETTERS[word]) for word in counts.keys() & _LETTERS.keys()]
  if not text.isascii():
    found += [(min(text.count(word), 3), change) for word, change in _CHARACTERS.items() if word in text]
  valence = math.fsum(count / 3 * change[0] for count, change in found)
  arousal = math.fsum(count / 3 * change[1] for count, change in found)
  arousal += 0.1 * min(text.count("!") + text.count("！"), 3) / 3
  return min(valence, _MOST_VALENCE) * (0.5 + min(arousal, _MOST_AROUSAL))


class Lexical:
  """Encoder without weights: words hashed into `width` columns, (1 + log count) times how rare they are in the memory.

  What one text counts is kept, since the same text comes back case after case.
  """

  def __init__(self, width: int = 4096):
    self._width = width
    self._counts: dict[str, tuple[np.ndarray, np.ndarray]] = {}

  def __call__(self, texts: Sequence[str]) -> Callable[[Sequence[str]], np.ndarray]:
    frequency = np.zeros(self._width, np.float32)
    for text in texts:
      frequency[self._count(text)[0]] += 1
    rarity = np.log((1 + len(texts)) / (1 + frequency)).astype(np.float32) + 1

    def embed(queries: Sequence[str]) -> np.ndarray:
      out = np.zeros((len(queries), self._width), np.float32)
      for row, text in zip(out, queries, strict=True):
        at, count = self._count(text)
        row[at] = count * rarity[at]
      norm = np.linalg.norm(out, axis=1, keepdims=True)
      return out / np.where(norm > 0, norm, 1)

    return embed

  def _count(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    if text not in self._counts:
      counts: collections.Counter[int] = collections.Counter()
      for word, number in collections.Counter(words(text)).items():
        counts[zlib.crc32(word.encode("utf-8", "surrogatepass")) % self._width] += number
      at = np.fromiter(counts, np.int32, len(counts))
      self._counts[text] = at, 1 + np.log(np.fromiter(counts.values(), np.float32, len(counts)))
    return self._counts[text]
