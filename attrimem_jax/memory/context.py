"""The answer context: what the answer model reads before a question, and who wrote each of its tokens.

A source is one token that a policy call of this rollout sampled and that stands in the context with its own id. It maps
to exactly one position of one call's completion. Dates, line breaks, headings, the question, and records that were
given or that another rollout wrote are never sources: they carry -1 and no ablation touches them.

    context  [2024-03-04] Ann lives in Lisbon \\n
    source        -1       0   1    2    3    -1

An answer model with another tokenizer than the policy's reads the same text in tokens of its own. Then a source is the
shortest run of the policy's tokens that covers whole tokens of the answer model, and its credit is shared by bytes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.memory.prompts import Prompts, around, fill, fit_records, spoken_date
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.spans import Piece, align, pieces
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey, Question, Record


@dataclasses.dataclass(frozen=True)
class Source:
  """The policy call that wrote a token, and the token's position in that call's completion.

  `shares` are those of the tokens from `position` on in the credit of the source: one, unless tokenizers differ.
  """

  owner: CallKey
  position: int
  shares: tuple[float, ...] = (1.0,)


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
  """Records as the answer model reads them.

  Attributes:
    ids: int32 [T].
    source: int32 [T], index into `sources`, or -1.
    sources: in order of their place in the context. A token that two records share (one token can hold the end of a
      line and the start of the next) is one source that stands at two places.
    records: what the context shows, in order of their ids, which is the order of writing.
  """

  ids: np.ndarray
  source: np.ndarray
  sources: tuple[Source, ...]
  records: tuple[Record, ...]


def build(
  tokenizer: Tokenizer,
  records: Sequence[Record],
  rollout: tuple[str, int] | None = None,
  *,
  writer: Tokenizer | None = None,
  budget: int | None = None,
) -> Context:
  """One line per record: its date in brackets, then its ids.

  Args:
    tokenizer: of the answer model.
    records: what was retrieved, the best first.
    rollout: (history id, rollout) whose tokens are sources; None takes the tokens of every call.
    writer: the policy's tokenizer, if it is another one.
    budget: leaves out the last records where all lines together hold more tokens.
  """
  writer = writer or tokenizer
  same = writer.fingerprint == tokenizer.fingerprint
  read = {r.id: r if same else _translated(r, writer, tokenizer) for r in records}
  kept = read.values() if budget is None else fit_records(tokenizer, read.values(), budget)
  ids: list[int] = []
  source: list[int] = []
  index: dict[Source, int] = {}
  written = {r.id: r for r in records}
  shown = tuple(written[r.id] for r in sorted(kept, key=lambda r: r.id))
  for record in shown:
    mine = read[record.id].ids
    before, after = around(tokenizer, _bracket(record.date), read[record.id])
    ids += [*before, *mine, *after]
    sources = _sources(record, rollout) if same else _shared_sources(record, mine, rollout, writer, tokenizer)
    owned = [index.setdefault(s, len(index)) for s in sources] or [-1] * len(mine)
    source += [-1] * len(before) + owned + [-1] * len(after)
  return Context(np.array(ids, np.int32), np.array(source, np.int32), tuple(index), shown)


def answer_prefix(chat: Chat, prompts: Prompts) -> list[int]:
  """What all questions share: system message, opened user message, heading of the memory. Never empty."""
  ids = chat.message("system", prompts.answer_system) if prompts.answer_system else []
  return ids + chat.open("user") + chat.tokenizer.encode(prompts.memory)


def answer_suffix(chat: Chat, prompts: Prompts, context: Context, question: Question) -> tuple[np.ndarray, np.ndarray]:
  """What follows the prefix: context, question with its date, start of the reply.

  Returns:
    (ids, source), int32 [T] each; `source` indexes `context.sources`, -1 outside of the context.
  """
  encode = chat.tokenizer.encode
  empty = encode(prompts.no_memory) if not context.records else []
  tail = np.array([*empty, *encode(_asked(prompts, question)), *chat.reply()], np.int32)
  return np.concatenate([context.ids, tail]), np.concatenate([context.source, np.full(len(tail), -1, np.int32)])


def answer_messages(prompts: Prompts, memory: str, question: Question) -> list[tuple[str, str]]:
  """What prefix and suffix say, as (role, text) pairs for a model behind an endpoint; `memory` holds the lines."""
  system = [("system", prompts.answer_system)] if prompts.answer_system else []
  return [*system, ("user", prompts.memory + (memory or prompts.no_memory) + _asked(prompts, question))]


def _asked(prompts: Prompts, question: Question) -> str:
  if not question.date:
    return fill(prompts.undated_question, question=question.text)
  return fill(prompts.question, date=spoken_date(question.date, prompts.weekdays), question=question.text)


def _bracket(date: str) -> str:
  """The day only: the hour at which a session took place says nothing about the record."""
  return f"[{date.partition('T')[0]}]" if date else ""


def _sources(record: Record, rollout: tuple[str, int] | None) -> list[Source]:
  owner = record.owner
  if owner is None or (rollout is not None and (owner.history, owner.rollout) != rollout):
    return []
  return [Source(owner, record.start + offset) for offset in range(len(record.ids))]


def _translated(record: Record, writer: Tokenizer, tokenizer: Tokenizer) -> Record:
  """The record with the same text, blanks included, in ids of another tokenizer."""
  return dataclasses.replace(record, ids=tuple(tokenizer.encode("".join(p.text for p in _pieces(record, writer)))))


def _pieces(record: Record, writer: Tokenizer) -> list[Piece]:
  return pieces(writer.pieces(record.ids))


def _shared_sources(
  record: Record, ids: Sequence[int], rollout: tuple[str, int] | None, writer: Tokenizer, tokenizer: Tokenizer
) -> list[Source]:
  """The source of each of a record's ids in the answer model's tokens.

  The policy's tokens are taken by whole characters: bytes that are none become U+FFFD when the text is translated.
  """
  by_token = _sources(record, rollout)
  if not by_token:
    return []
  characters = _pieces(record, writer)
  sizes = [len(token) for token in writer.pieces(record.ids)]
  found: list[Source] = []
  for theirs, mine in align([p.text.encode() for p in characters], tokenizer.pieces(ids)):
    run = characters[theirs]
    bytes_of = sizes[run[0].start : run[-1].stop]
    shares = tuple(size / sum(bytes_of) for size in bytes_of)
    found += [dataclasses.replace(by_token[run[0].start], shares=shares)] * (mine.stop - mine.start)
  return found
