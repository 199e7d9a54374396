"""One answer model for all memory systems: passages within a budget, in the order of time, then the question.

A passage that does not fit is left out, as is all that ranks below it; only the best one is cut, at its end, where it
is too long alone. What was left out is counted.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from attrimem_jax.io import client
from attrimem_jax.memory.context import Context, answer_messages, answer_prefix, answer_suffix, build
from attrimem_jax.rollout.answering import Reader, sample_answers
from attrimem_jax.systems.protocol import Passage
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Module, Question, Record


@dataclasses.dataclass(frozen=True)
class Reply:
  """An answer and what it cost.

  Attributes:
    text: None where the model gave none (its endpoint failed): the question counts as not answered.
    read, written: tokens of the prompt and of the answer.
    shown: the passages that were read, as places in what was retrieved.
    left_out: tokens of retrieved passages that did not fit.
  """

  text: str | None
  read: int
  written: int
  shown: tuple[int, ...]
  left_out: int


class AnswerModel(Protocol):
  """Answers questions, each from its own passages."""

  @property
  def name(self) -> str: ...

  def answer(
    self, questions: Sequence[Question], retrieved: Sequence[Sequence[Passage]], whole: bool
  ) -> list[Reply]: ...


def fit(lengths: Sequence[int], budget: int) -> tuple[int, int, int]:
  """Which passages, best first, fit a budget: (how many, tokens that the best one is cut to, tokens left out).

  fit([5, 3, 9, 1], 10) → (2, 5, 10): the third does not fit, and the fourth ranks below it.
  """
  if lengths and lengths[0] > budget:
    return (1, budget, sum(lengths) - budget) if budget > 0 else (0, 0, sum(lengths))
  count = int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), budget, side="right")) if lengths else 0
  return count, lengths[0] if lengths else 0, sum(lengths[count:])


class Decoder:
  """An answer model of this project. Questions that share all passages read them once."""

  def __init__(self, reader: Reader, chat: Chat, most: int = 0):
    """`most` limits the tokens of passages that may fill the whole window; 0 leaves the limit to the model."""
    self.name, self._reader, self._chat, self._most = reader.model.name, reader, chat, most
    self._line = functools.lru_cache(maxsize=1 << 16)(self._encoded)

  def answer(self, questions: Sequence[Question], retrieved: Sequence[Sequence[Passage]], whole: bool) -> list[Reply]:
    if not questions:
      return []
    prefix = answer_prefix(self._chat, self._reader.prompts)
    budget = self._window(prefix, questions) if whole else self._reader.max_context
    contexts = [self._context(passages, budget) for passages in retrieved]
    if all(tuple(passages) == tuple(retrieved[0]) for passages in retrieved):
      prefix += contexts[0][0].ids.tolist()
      contexts = [
        (dataclasses.replace(c, ids=c.ids[:0], source=c.source[:0]), shown, left_out) for c, shown, left_out in contexts
      ]
    prompts = [
      answer_suffix(self._chat, self._reader.prompts, context, question)[0]
      for (context, *_), question in zip(contexts, questions, strict=True)
    ]
    completions = sample_answers(self._reader, prefix, prompts)
    return [
      Reply(self._chat.said(c.ids), len(prefix) + len(prompt), len(c.ids), shown, left_out)
      for c, prompt, (_, shown, left_out) in zip(completions, prompts, contexts, strict=True)
    ]

  def messages(
    self, question: Question, passages: Sequence[Passage], whole: bool
  ) -> tuple[list[tuple[str, str]], tuple[int, ...], int]:
    """What a model elsewhere is asked, as texts; the passages that it is shown; tokens of those left out.

    Tokens are those of this model. What fills the window is limited by `most`, or else as other passages are.
    """
    budget = (whole and self._most) or self._reader.max_context
    context, shown, left_out = self._context(passages, budget)
    text = self._chat.tokenizer.decode(context.ids.tolist())
    return answer_messages(self._reader.prompts, text, question), shown, left_out

  def _window(self, prefix: list[int], questions: Sequence[Question]) -> int:
    """The tokens that passages may hold before the longest question of all."""
    nothing = Context(np.zeros(0, np.int32), np.zeros(0, np.int32), (), ())
    asked = max(len(answer_suffix(self._chat, self._reader.prompts, nothing, q)[0]) for q in questions)
    room = self._reader.model.config.max_positions - self._reader.max_new_tokens - len(prefix) - asked
    return min(room, self._most or room)

  def _context(self, passages: Sequence[Passage], budget: int) -> tuple[Context, tuple[int, ...], int]:
    lines = [self._line(passage) for passage in passages]
    count, first, left_out = fit([len(ids) for ids, _ in lines], budget)
    shown = tuple(sorted(range(count), key=lambda i: (passages[i].place, i)))
    parts = [lines[i][0][:first] if i == 0 else lines[i][0] for i in shown]
    ids = np.concatenate([np.zeros(0, np.int32), *parts])
    records = tuple(lines[i][1] for i in shown)
    return Context(ids, np.full(len(ids), -1, np.int32), (), records), shown, left_out

  def _encoded(self, passage: Passage) -> tuple[np.ndarray, Record]:
    ids = tuple(self._chat.tokenizer.encode(passage.text)) or tuple(self._chat.tokenizer.encode("\n"))
    record = Record(passage.place, Module.EPISODIC, passage.text, ids, passage.date)
    return build(self._chat.tokenizer, [record]).ids, record


class Remote:
  """An answer model behind an endpoint.

  Args:
    name: of the model.
    complete: asks it, such as `io.client.Client.complete` with its parameters.
    decoder: words the questions and fits passages to budgets.
  """

  def __init__(
    self, name: str, complete: Callable[[Sequence[client.Messages]], Sequence[client.Reply]], decoder: Decoder
  ):
    self.name, self._complete, self._decoder = name, complete, decoder

  def answer(self, questions: Sequence[Question], retrieved: Sequence[Sequence[Passage]], whole: bool) -> list[Reply]:
    """Raises ValueError where no question at all was answered: the endpoint is down, and the conversation can wait."""
    asked = [self._decoder.messages(q, passages, whole) for q, passages in zip(questions, retrieved, strict=True)]
    replies = self._complete([messages for messages, _, _ in asked])
    if replies and all(reply.error for reply in replies):
      raise ValueError(
        f"{self.name} answered none of {len(replies)} questions, the last because of {replies[-1].error}"
      )
    return [
      Reply(None if r.error else r.text.strip(), r.prompt_tokens, r.completion_tokens, shown, left_out)
      for r, (_, shown, left_out) in zip(replies, asked, strict=True)
    ]
