"""The answer context: what the answer model reads before a question, and who wrote each of its tokens.

A source is one token that a policy call of this rollout sampled and that stands in the context with its own id. It maps
to exactly one position of one call's completion. Dates, line breaks, headings, the question, and records that were
given or that another rollout wrote are never sources: they carry -1 and no ablation touches them.

    context  [2024-03-04] Ann lives in Lisbon \\n
    source        -1       0   1    2    3    -1
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.memory.prompts import Prompts, around, fill, spoken_date
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey, Question, Record


@dataclasses.dataclass(frozen=True)
class Source:
  """The policy call that wrote a token, and the token's position in that call's completion."""

  owner: CallKey
  position: int


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


def build(tokenizer: Tokenizer, records: Sequence[Record], rollout: tuple[str, int] | None = None) -> Context:
  """One line per record: its date in brackets, then its own ids.

  Args:
    tokenizer: of the policy and the answer model, which must be the same one.
    records: what was retrieved, in any order.
    rollout: (history id, rollout) whose tokens are sources; None takes the tokens of every call.
  """
  records = tuple(sorted(records, key=lambda r: r.id))
  ids: list[int] = []
  source: list[int] = []
  index: dict[Source, int] = {}
  for record in records:
    before, after = around(tokenizer, _bracket(record.date), record)
    ids += [*before, *record.ids, *after]
    owned = [index.setdefault(s, len(index)) for s in _sources(record, rollout)] or [-1] * len(record.ids)
    source += [-1] * len(before) + owned + [-1] * len(after)
  return Context(np.array(ids, np.int32), np.array(source, np.int32), tuple(index), records)


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
