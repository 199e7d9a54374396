"""Supervised examples of the synthetic world on the shared-prefix layout: what the shipped models learn.

Writing: a session is the prefix, its four module calls are the suffixes, the teacher's actions the completions.
Answering: a memory is the prefix, the questions about it are the suffixes. Both render prompts by the functions that
rollouts use.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from attrimem_jax.data.answering import answer_example
from attrimem_jax.data.teacher import Sloppiness, teacher_actions
from attrimem_jax.memory import context as contexts
from attrimem_jax.memory.actions import parse
from attrimem_jax.memory.bank import Bank, apply_all
from attrimem_jax.memory.prompts import Prompts, fit_records, module_suffix, session_prefix
from attrimem_jax.nn.batching import pack
from attrimem_jax.rl.sft import SftBatch
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey, Episode, Finish, History, Module, Record


@dataclasses.dataclass(frozen=True)
class Example:
  """A prefix and the (prompt, completion) pairs that continue it; completions end with the stop token."""

  prefix: list[int]
  suffixes: list[tuple[list[int], list[int]]]


def write_as_teacher(
  chat: Chat, episode: Episode, *, sloppiness: Sloppiness, rng: np.random.Generator, core_budget: int | None = None
) -> tuple[Bank, list[list[tuple[Module, Bank, list[int]]]]]:
  """Lets the teacher write a whole history.

  Returns:
    The final bank, and for each session the module, the bank before the session and the completion of each call.
  """
  bank, calls = Bank.empty(), []
  for number, session in enumerate(episode.history.sessions):
    before, here = bank, []
    for module in Module:
      text = teacher_actions(episode, number, module, before, sloppiness=sloppiness, rng=rng)
      ids = chat.completion(text)
      owner = CallKey(episode.history.id, 0, number, module)
      actions = parse(ids, chat.tokenizer, module, Finish.STOP)
      bank, _ = apply_all(bank, actions, module=module, date=session.date, owner=owner, core_budget=core_budget)
      here.append((module, before, ids))
    calls.append(here)
  return bank, calls


def writing_examples(
  chat: Chat, prompts: Prompts, episode: Episode, *, sloppiness: Sloppiness, rng: np.random.Generator
) -> list[Example]:
  """One example per session: the teacher's four completions."""
  _, calls = write_as_teacher(chat, episode, sloppiness=sloppiness, rng=rng)
  return trajectory_examples(chat, prompts, episode.history, calls)


def trajectory_examples(
  chat: Chat,
  prompts: Prompts,
  history: History,
  calls: Sequence[Sequence[tuple[Module, Bank, list[int]]]],
  records_budget: int | None = None,
) -> list[Example]:
  """One example per session from the (module, bank before the session, completion) of each of its calls.

  Args:
    chat, prompts: of the policy that learns.
    history: what was read.
    calls: of each of its sessions.
    records_budget: tokens of existing records that a module is shown, the newest; None shows all.
  """

  return [
    Example(
      session_prefix(chat, prompts, session),
      [
        (module_suffix(chat, prompts, module, shown(chat.tokenizer, module, bank, records_budget)), ids)
        for module, bank, ids in here
      ],
    )
    for session, here in zip(history.sessions, calls, strict=True)
  ]


def shown(tokenizer: Tokenizer, module: Module, bank: Bank, budget: int | None) -> tuple[Record, ...]:
  """The records that a module reads: the newest within a budget of tokens; all of core memory, or without a budget."""
  records = bank.current(module)
  if budget is None or module == Module.CORE:
    return records
  return fit_records(tokenizer, reversed(records), budget)


def answering_example(chat: Chat, prompts: Prompts, episode: Episode, *, rng: np.random.Generator) -> Example:
  """A memory as a careless policy leaves it, and all questions with the sentences that follow from that memory."""
  lines, asked = answer_example(rng, episode)
  records = [
    Record(number, Module.SEMANTIC, text, tuple(chat.tokenizer.encode(" " + text)), date)
    for number, (text, date) in enumerate(lines, 1)
  ]
  context = contexts.build(chat.tokenizer, records)
  suffixes = []
  for question, sentence in asked:
    ids, _ = contexts.answer_suffix(chat, prompts, context, question)
    suffixes.append((ids[len(context.ids) :].tolist(), chat.completion(sentence)))
  return Example([*contexts.answer_prefix(chat, prompts), *context.ids.tolist()], suffixes)


@dataclasses.dataclass(frozen=True)
class Widths:
  """The one shape of all batches of a run, so that one program is compiled: suffixes per prefix, and columns."""

  rows: int
  prefix: int
  prompt: int
  completion: int

  def holds(self, example: Example) -> bool:
    """Whether an example fits."""
    return len(example.prefix) <= self.prefix and all(
      len(p) <= self.prompt and len(c) <= self.completion for p, c in example.suffixes
    )


def batch(examples: Sequence[Example], widths: Widths) -> SftBatch:
  """Pads examples that `widths` holds to one batch; completions carry the loss, suffixes beyond `rows` are left out."""
  shared = pack(
    [e.prefix for e in examples],
    [e.suffixes[: widths.rows] for e in examples],
    prefix_width=widths.prefix,
    prompt_width=widths.prompt,
    completion_width=widths.completion,
    rows=widths.rows,
  )
  return SftBatch(shared, shared.suffix_mask[..., -widths.completion :])
