"""A teacher that is any chat model: asked with the words that instruct a policy, it writes trajectories to learn from.

What it writes is kept as one JSON object a line, in the form that `rl.expert` reads. A line of its replies that is no
action, or that the bank refuses, is left out and counted: the policy learns from what counted alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from attrimem_jax.data.reading import Log
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import FULL, module_messages
from attrimem_jax.rl.expert import Change, Writer
from attrimem_jax.rl.teaching import shown
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import CallKey, History, Module, Session

Complete = Callable[[Sequence[Sequence[tuple[str, str]]]], Sequence[str | None]]
"""(role, text) messages to what a model said of each; None where it said nothing."""


def write(
  complete: Complete, chat: Chat, histories: Sequence[History], *, core_budget: int, records_budget: int
) -> tuple[list[dict[str, Any]], str]:
  """Lets the teacher write histories, all at once, session by session.

  Args:
    complete: the teacher.
    chat: of the policy that shall learn: budgets count its tokens.
    histories: what to write.
    core_budget: tokens that core memory may hold.
    records_budget: tokens of existing records that a module is shown, the newest.

  Returns:
    One object for each call, and what to tell people about lines left out.

  Raises:
    ValueError: there was no reply at all.
  """
  banks = [Bank.empty()] * len(histories)
  rows: list[dict[str, Any]] = []
  log: Log = {}
  for number in range(max(len(history.sessions) for history in histories)):
    live = [h for h, history in enumerate(histories) if number < len(history.sessions)]
    asked = [(h, module) for h in live for module in Module]
    prompts = [
      module_messages(
        FULL,
        histories[h].sessions[number],
        module,
        shown(chat.tokenizer, module, banks[h], records_budget),
        (banks[h].tokens(module), core_budget) if module == Module.CORE else None,
      )
      for h, module in asked
    ]
    for (h, module), said in zip(asked, complete(prompts), strict=True):
      history, session = histories[h], histories[h].sessions[number]
      owner = CallKey(history.id, 0, number, module)
      writer = Writer(
        chat, banks[h], module, session.date, owner, f"{history.id}/{number}/{module}", log, core_budget=core_budget
      )
      writer.actions((said or "").rpartition("</think>")[2])
      banks[h] = writer.bank
      rows.append(_row(history, number, session, module, None if said is None else "\n".join(writer.lines)))
  if all(row["actions"] is None for row in rows):
    raise ValueError(
      f"the teacher answered none of {len(rows)} calls: is its endpoint running, and is its model there?"
    )
  failed, refused = sum(row["actions"] is None for row in rows), len(log.get(Change.REFUSED, ()))
  return (
    rows,
    f"{len(rows)} calls, {failed} without a reply, {refused} lines that are no action or that the bank refuses",
  )


def _row(history: History, number: int, session: Session, module: Module, actions: str | None) -> dict[str, Any]:
  messages = [{"role": turn.speaker, "content": turn.text} for turn in session.turns]
  return {
    "conversation_id": history.id,
    "session_index": number,
    "agent_type": str(module),
    "input": {"new_session": {"timestamp": session.date, "messages": messages}},
    "actions": actions,
  }
