"""Which records a question (or a session) is answered from. Retrievers are frozen and deterministic.

`Bm25` compares words (Robertson & Zaragoza 2009, through the bm25s library); `Dense` compares vectors of any decoder,
read off its last token (as Qwen3-Embedding is trained to be). Both rank; `recall` adds core memory, always read.
"""

import collections
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import bm25s
import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import bucket
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Module, Record

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to tell of every index that it builds

Embed = Callable[[Sequence[str]], np.ndarray]
"""Texts to vectors: float32 [n, D]."""


class Retriever(Protocol):
  """Ranks records. `top_k` is the most that it returns; where no more are there, all come back in their own order."""

  @property
  def top_k(self) -> int: ...

  def rank(self, query: str, records: Sequence[Record]) -> list[int]:
    """Positions in `records`, best first; ties keep the order of `records`."""
    ...

  def rank_many(self, queries: Sequence[str], records: Sequence[Record]) -> list[list[int]]:
    """`rank` for many queries on the same records, which are indexed once."""
    ...


def recall(retriever: Retriever, queries: Sequence[str], records: Sequence[Record]) -> list[tuple[Record, ...]]:
  """Per query: all core records, then the `top_k` best of the others, best first (so that a budget cuts the worst)."""
  core = [r for r in records if r.module == Module.CORE]
  others = [r for r in records if r.module != Module.CORE]
  found = retriever.rank_many(queries, others)
  return [(*core, *(others[i] for i in ranked)) for ranked in found]


@dataclasses.dataclass(frozen=True)
class Bm25:
  """Words in common, weighted by how rare they are. One index of 40 records takes about 1.5 ms, a query 0.05 ms."""

  top_k: int = 10

  def rank(self, query: str, records: Sequence[Record]) -> list[int]:
    return self.rank_many([query], records)[0]

  def rank_many(self, queries: Sequence[str], records: Sequence[Record]) -> list[list[int]]:
    if len(records) <= self.top_k:
      return [list(range(len(records))) for _ in queries]
    corpus = [words(r.text) for r in records]
    if not any(corpus):  # nothing but punctuation: bm25s cannot index that
      return [list(range(self.top_k)) for _ in queries]
    index = bm25s.BM25()
    index.index(corpus, show_progress=False)
    nothing = np.zeros(len(records), np.float32)
    asked = [words(query) for query in queries]
    return [_best(index.get_scores(query) if query else nothing, self.top_k) for query in asked]


# Scripts that are written without blanks (kana and Han): each character is a word of its own.
_NO_BLANKS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_NO_BLANKS}]|[^\W{_NO_BLANKS}]+")


def words(text: str) -> list[str]:
  """Words for matching: casefolded, without punctuation; Chinese and Japanese by character."""
  return _WORD.findall(text.casefold())


class Dense:
  """Cosine of vectors; the vectors of records are kept, since a bank's records come back question after question."""

  def __init__(self, embed: Embed, top_k: int = 10, *, instruction: str = "", cache: int = 20_000):
    """
    Args:
      embed: texts to vectors.
      top_k: the most records to return.
      instruction: put before a query (not before records); Qwen3-Embedding reads
        "Instruct: Given a question, retrieve the memories that answer it\\nQuery:".
      cache: how many records' vectors to keep.
    """
    self.top_k = top_k
    self._embed, self._instruction, self._limit = embed, instruction, cache
    self._vectors: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

  def rank(self, query: str, records: Sequence[Record]) -> list[int]:
    return self.rank_many([query], records)[0]

  def rank_many(self, queries: Sequence[str], records: Sequence[Record]) -> list[list[int]]:
    if len(records) <= self.top_k:
      return [list(range(len(records))) for _ in queries]
    corpus = self._records([r.text for r in records])
    scores = _unit(self._embed([self._instruction + query for query in queries])) @ corpus.T
    return [_best(row, self.top_k) for row in scores]

  def _records(self, texts: list[str]) -> np.ndarray:
    missing = [text for text in dict.fromkeys(texts) if text not in self._vectors]
    if missing:
      self._vectors.update(zip(missing, _unit(self._embed(missing)), strict=True))
    found = np.stack([self._vectors[text] for text in texts])
    while len(self._vectors) > self._limit:
      self._vectors.popitem(last=False)
    return found


def _best(scores: np.ndarray, k: int) -> list[int]:
  return np.argsort(-scores, kind="stable")[:k].tolist()


def _unit(vectors: np.ndarray) -> np.ndarray:
  norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
  return vectors / np.where(norm > 0, norm, 1)


def last_token_embed(
  config: DecoderConfig, params: decoder.Params, tokenizer: Tokenizer, *, end: str | None = None, rows: int = 16
) -> Embed:
  """Reads a text with a decoder and returns the final hidden state of its last token, for `Dense`.

  Args:
    config, params: the decoder.
    tokenizer: its tokenizer.
    end: a control token to put behind every text and to read from; Qwen3-Embedding is trained with "<|endoftext|>".
    rows: texts per forward pass; with the buckets of lengths this bounds the number of compilations.
  """
  tail = [] if end is None else [tokenizer.control(end)]
  most = config.max_positions - 1 - len(tail)
  forward = jax.jit(functools.partial(_last_states, config))

  def embed(texts: Sequence[str]) -> np.ndarray:
    ids = [tokenizer.encode(text)[:most] + tail for text in texts]
    out = np.zeros((len(texts), config.width), np.float32)  # a text without tokens keeps the zero vector
    order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: len(ids[i]))
    for group in (order[i : i + rows] for i in range(0, len(order), rows)):
      out[group] = forward(params, *pack_whole([ids[i] for i in group], rows))[: len(group)]
    return out

  return embed


def _last_states(config: DecoderConfig, params: decoder.Params, batch: decoder.Shared, last: jax.Array) -> jax.Array:
  return decoder.hidden(config, params, batch)[0, jnp.arange(len(last)), last]


def pack_whole(texts: Sequence[Sequence[int]], rows: int) -> tuple[decoder.Shared, np.ndarray]:
  """The texts as suffixes [1, rows, T] of a prefix that none of them sees, and the column of each one's last token.

  A decoder needs a prefix; hiding it leaves every state as it would be without, since rotary positions are relative.
  """
  suffix = np.zeros((1, rows, bucket(max(map(len, texts)))), np.int32)
  mask = np.zeros(suffix.shape, bool)
  last = np.zeros(rows, np.int32)
  for row, ids in enumerate(texts):
    suffix[0, row, : len(ids)], mask[0, row, : len(ids)], last[row] = ids, True, len(ids) - 1
  prefix, seen, kept = np.zeros((1, 1), np.int32), np.ones((1, 1), bool), np.zeros((1, rows, 1), bool)
  return decoder.Shared(*map(jnp.asarray, (prefix, seen, suffix, mask, kept))), last
