"""Writing the memory of histories: session by session, all rollouts and all modules of a session in one batch.

A session is one prefix; each rollout and module is a suffix with the records of its own bank. The four modules of a
rollout read the bank as it was before the session, so that they can be sampled together; their actions are applied in
the order of `Module`. Nothing here can see a question: the input is a `History`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.memory import bank as banks
from attrimem_jax.memory.actions import Action, parse
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.prompts import Prompts, fit_records, module_suffix, session_prefix
from attrimem_jax.memory.retrieval import Retriever
from attrimem_jax.rollout.sampling import Completion, Model, Sampling, complete
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import CallKey, History, Module, Record, Session


@dataclasses.dataclass(frozen=True)
class Window:
  """A part of a history to write: sessions `start:stop`, from a given bank. `number` seeds its randomness."""

  history: History
  number: int
  start: int
  stop: int
  bank: Bank = dataclasses.field(default_factory=Bank.empty)

  def __post_init__(self):
    if not 0 <= self.start < self.stop <= len(self.history.sessions):
      raise ValueError(
        f"history {self.history.id!r} has {len(self.history.sessions)} sessions, a window needs at least one of them: "
        f"got {self.start}:{self.stop}"
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """One policy generation: what was read, what was sampled, and what became of each action in it."""

  key: CallKey
  prefix: list[int]
  prompt: list[int]
  completion: Completion
  actions: tuple[Action, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
  """All calls of one pass over a window, and the bank that they left."""

  window: Window
  index: int
  calls: tuple[Call, ...]
  bank: Bank


@dataclasses.dataclass(frozen=True)
class Writer:
  """A policy with all that decides how it writes.

  Attributes:
    model: `io.models.LanguageModel`.
    prompts: the words around sessions and records.
    sampling: temperature and limits of a call.
    retriever: chooses the records that a module is shown, with the session as the query.
    modules: the modules that are called, in the order in which their actions are applied.
    core_budget: tokens that core memory may hold.
    records_budget: tokens of records that a module is shown.
    chat: ChatML of the model's tokenizer; made if None.
    dtype: of the computation.
    at_once: the most calls that are under way together, the others wait for their places; 0 for all of a session.
  """

  model: Model
  prompts: Prompts
  sampling: Sampling
  retriever: Retriever
  modules: tuple[Module, ...] = tuple(Module)
  core_budget: int = 256
  records_budget: int = 1024
  chat: Chat | None = None
  dtype: str = "float32"
  step: int = 16
  at_once: int = 0


def write(writer: Writer, windows: Sequence[Window], group: int, key: jax.Array) -> list[list[Rollout]]:
  """Writes every window `group` times.

  Args:
    writer: the policy and its settings.
    windows: what to write; all rollouts of one window share its sessions and its given bank.
    group: G, rollouts per window.
    key: a typed key of this step. A call draws from the key folded with window number, rollout, session and module,
      so its draws depend neither on the batch it runs in nor on what was drawn before.

  Returns:
    For each window its G rollouts.
  """
  chat = writer.chat or Chat(writer.model.tokenizer)
  state = [[(window.bank, ()) for _ in range(group)] for window in windows]
  for offset in range(max(window.stop - window.start for window in windows)):
    live = [(w, window) for w, window in enumerate(windows) if window.start + offset < window.stop]
    calls = _one_session(writer, chat, live, [state[w] for w, _ in live], offset, key, len(windows))
    for (w, window), rows in zip(live, calls, strict=True):
      session = window.history.sessions[window.start + offset]
      state[w] = [_applied(writer, chat, session, *old, new) for old, new in zip(state[w], rows, strict=True)]
  return [
    [Rollout(window, g, calls, bank) for g, (bank, calls) in enumerate(rows)]
    for window, rows in zip(windows, state, strict=True)
  ]


def _one_session(writer: Writer, chat: Chat, live, states, offset: int, key, width: int) -> list[list[list[Call]]]:
  """Samples the calls of one session of each live window: [window][rollout][module]."""
  prefixes, prompts, paths = [], [], []
  for (_, window), rows in zip(live, states, strict=True):
    session = window.history.sessions[window.start + offset]
    query = "\n".join(turn.text for turn in session.turns)
    prefixes.append(session_prefix(chat, writer.prompts, session))
    prompts.append([_prompt(writer, chat, m, bank, query) for bank, _ in rows for m in writer.modules])
    paths.append(
      [(window.number, g, window.start + offset, _order(m)) for g in range(len(rows)) for m in writer.modules]
    )
  # Windows that have ended stay in the batch as rows of padding, so that shapes do not change from session to session.
  missing = width - len(live)
  keys = fold(key, np.array(paths, np.uint32))
  sampled = complete(
    writer.model,
    prefixes + [prefixes[0][:1]] * missing,
    prompts + [[]] * missing,
    np.concatenate([keys, np.zeros((missing, *keys.shape[1:]), np.uint32)]),
    writer.sampling,
    rows=len(prompts[0]),
    at_once=max(1, writer.at_once // width) if writer.at_once else None,
    dtype=writer.dtype,
    step=writer.step,
  )
  calls = []
  for w, (_, window) in enumerate(live):
    flat = [
      Call(CallKey(window.history.id, g, s, tuple(Module)[m]), prefixes[w], prompt, completion, ())
      for (_, g, s, m), prompt, completion in zip(paths[w], prompts[w], sampled[w], strict=True)
    ]
    size = len(writer.modules)
    calls.append([flat[at : at + size] for at in range(0, len(flat), size)])
  return calls


def _prompt(writer: Writer, chat: Chat, module: Module, bank: Bank, query: str) -> list[int]:
  records = bank.current(module)
  # Core memory is a whole; of the other modules the records that the session speaks of come first.
  order = range(len(records)) if module == Module.CORE else writer.retriever.rank(query, records)
  ranked = [records[i] for i in order]
  shown: Sequence[Record] = fit_records(chat.tokenizer, ranked, writer.records_budget)
  usage = (bank.tokens(module), writer.core_budget) if module == Module.CORE else None
  return module_suffix(chat, writer.prompts, module, shown, usage)


def _applied(writer: Writer, chat: Chat, session: Session, bank: Bank, past: tuple[Call, ...], calls: Sequence[Call]):
  """The bank after the calls of a session, and all calls so far with the outcomes of their actions."""
  done = []
  for call in calls:
    actions = parse(call.completion.ids.tolist(), chat.tokenizer, call.key.module, call.completion.finish)
    bank, actions = banks.apply_all(
      bank, actions, module=call.key.module, date=session.date, owner=call.key, core_budget=writer.core_budget
    )
    done.append(dataclasses.replace(call, actions=actions))
  return bank, (*past, *done)


def _order(module: Module) -> int:
  return tuple(Module).index(module)


def fold(key: jax.Array, path: np.ndarray) -> np.ndarray:
  """Raw keys uint32 [..., 2] of `key` folded with each number along the last axis of `path` uint32 [..., k]."""
  flat = path.reshape(-1, path.shape[-1])
  padded = np.zeros((1 << max(0, (len(flat) - 1).bit_length()), flat.shape[-1]), np.uint32)
  padded[: len(flat)] = flat
  return np.asarray(_fold(jax.random.key_data(key), padded))[: len(flat)].reshape(*path.shape[:-1], 2)


@jax.jit
def _fold(key, path):
  def one(numbers):
    folded = functools.reduce(jax.random.fold_in, numbers, jax.random.wrap_key_data(key, impl="threefry2x32"))
    return jax.random.key_data(folded)

  return jax.vmap(one)(jnp.asarray(path))
