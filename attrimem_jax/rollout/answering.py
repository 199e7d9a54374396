"""Asking a frozen answer model about banks: retrieve, build the context with its sources, sample an answer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import Context, answer_prefix, answer_suffix, build
from attrimem_jax.memory.prompts import Prompts
from attrimem_jax.memory.retrieval import Retriever, recall
from attrimem_jax.nn.batching import batches, bucket
from attrimem_jax.rollout.sampling import Completion, Model, Sampling, complete
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Question


@dataclasses.dataclass(frozen=True)
class Reader:
  """An answer model with all that decides how it is asked; its answers are greedy.

  Attributes:
    model: `io.models.LanguageModel`.
    prompts: the words around memory and question.
    retriever: ranks the records of a bank for a question; core records are always part of the context.
    max_context: tokens that the records in a context may hold.
    max_new_tokens: limit of an answer.
    token_budget: tokens of one batch, prompts included.
    writer: the policy's tokenizer. None, or one that is the model's own too: contexts hold the policy's own ids.
  """

  model: Model
  prompts: Prompts
  retriever: Retriever
  max_context: int = 1024
  max_new_tokens: int = 32
  dtype: str = "float32"
  token_budget: int = 32768
  step: int = 16
  writer: Tokenizer | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
  """What was asked and answered. `prompt` and `source` (int32 [T]) follow the shared answer prefix."""

  question: Question
  context: Context
  prompt: np.ndarray
  source: np.ndarray
  completion: Completion
  text: str


def prepare(
  reader: Reader, chat: Chat, bank: Bank, questions: Sequence[Question], rollout: tuple[str, int] | None = None
) -> list[tuple[Question, Context, np.ndarray, np.ndarray]]:
  """Retrieves for each question and builds its prompt: (question, context, prompt ids, source)."""
  found = recall(reader.retriever, [question.text for question in questions], bank.current())
  prepared = []
  for question, records in zip(questions, found, strict=True):
    context = build(chat.tokenizer, records, rollout, writer=reader.writer, budget=reader.max_context)
    prepared.append((question, context, *answer_suffix(chat, reader.prompts, context, question)))
  return prepared


def ask(
  reader: Reader, items: Sequence[tuple[Bank, Sequence[Question], tuple[str, int] | None]], chat: Chat | None = None
) -> list[list[Answer]]:
  """Answers questions about banks.

  Args:
    reader: the answer model.
    items: (bank, its questions, (history id, rollout) whose tokens count as sources, or None for all).
    chat: ChatML of the model's tokenizer; made if None.

  Returns:
    For each item an `Answer` per question, in order.
  """
  chat = chat or Chat(reader.model.tokenizer)
  prepared = [prepare(reader, chat, *item) for item in items]
  prompts = [prompt for group in prepared for _, _, prompt, _ in group]
  completions = iter(sample_answers(reader, answer_prefix(chat, reader.prompts), prompts))
  return [[_answer(chat, *parts, next(completions)) for parts in group] for group in prepared]


def _answer(chat: Chat, question, context, prompt, source, completion: Completion) -> Answer:
  return Answer(question, context, prompt, source, completion, chat.said(completion.ids))


def sample_answers(reader: Reader, prefix: list[int], prompts: Sequence[np.ndarray]) -> list[Completion]:
  """Greedy completions of any number of prompts after one prefix, sampled in batches of few shapes."""
  done: dict[int, Completion] = {}
  sampling = Sampling(reader.max_new_tokens, temperature=0.0)
  widths = [(reader.max_new_tokens, bucket(len(prompt), reader.step)) for prompt in prompts]
  for (_, width), rows, part in batches(widths, reader.token_budget):
    (out,) = complete(
      reader.model,
      [prefix],
      [[prompts[i] for i in part]],
      np.zeros((1, len(part), 2), np.uint32),
      sampling,
      rows=rows,
      prompt_width=width,
      dtype=reader.dtype,
      step=reader.step,
    )
    done.update(zip(part, out, strict=True))
  return [done[i] for i in range(len(prompts))]
