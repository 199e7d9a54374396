"""The policy as a memory system: it writes a history session by session, its bank is retrieved from as in training."""

import dataclasses
from collections.abc import Sequence

import jax

from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import Overflow, fit_history
from attrimem_jax.memory.retrieval import Retriever, recall
from attrimem_jax.rollout.writing import Window, Writer, write
from attrimem_jax.systems.protocol import Cost, Passage
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import History, Question


@dataclasses.dataclass(frozen=True)
class Records:
  """A bank; core records come first and are always retrieved."""

  bank: Bank
  retriever: Retriever
  cost: Cost

  def retrieve(self, questions: Sequence[Question]) -> list[tuple[Passage, ...]]:
    found = recall(self.retriever, [question.text for question in questions], self.bank.current())
    return [tuple(Passage(r.text, r.date, r.id) for r in records) for records in found]


@dataclasses.dataclass(frozen=True)
class Policy:
  """Attributes: the policy as it writes, the retriever of the answer model, tokens of a session's prompt, the seed."""

  writer: Writer
  retriever: Retriever
  budget: int
  overflow: Overflow
  key: jax.Array
  name: str = "policy"
  whole: bool = False
  sees_evidence: bool = False

  def write(self, history: History, number: int) -> Records:
    chat = self.writer.chat or Chat(self.writer.model.tokenizer)
    fitted, _ = fit_history(chat, self.writer.prompts, history, self.budget, self.overflow)
    ((rollout,),) = write(self.writer, [Window(fitted, number, 0, len(fitted.sessions))], 1, self.key)
    read = sum(len(call.prefix) + len(call.prompt) for call in rollout.calls)
    written = sum(len(call.completion.ids) for call in rollout.calls)
    return Records(rollout.bank, self.retriever, Cost(len(rollout.calls), read, written))
