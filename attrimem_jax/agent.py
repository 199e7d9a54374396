"""Library use: a policy that writes memories, and an answer model that is asked about them and can be explained.

    agent = load()                       # the shipped small models; any two models with one tokenizer will do
    memory = agent.write(history)        # the policy reads session by session and never sees a question
    reply = memory.ask("Where does Ann live?")
    reply.attribute()                    # which of the policy's tokens the answer leaned on

Each of the four shows itself in a notebook.
"""

import dataclasses
import datetime
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attrimem_jax import checks
from attrimem_jax.attribution.ablations import LEVELS
from attrimem_jax.attribution.attribute import Attribution, Problem, fit, measure, part_of
from attrimem_jax.attribution.lasso import Penalty
from attrimem_jax.attribution.scoring import Scorer
from attrimem_jax.data import dates
from attrimem_jax.io import models
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import answer_prefix
from attrimem_jax.memory.prompts import COMPACT, FULL, Overflow, Prompts, fit_history
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.rollout.answering import Answer, Reader, ask
from attrimem_jax.rollout.sampling import Model, Sampling
from attrimem_jax.rollout.writing import Rollout, Window, Writer, write
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.spans import find, pieces
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import History, Question, Record, Session, Turn
from attrimem_jax.view import html

Sessions = Sequence[tuple[str | datetime.date, Sequence[tuple[str, str]]]]
"""A conversation as plain data: (date, [(speaker, text), …]) for each session, in time order; the date may be ""."""


@dataclasses.dataclass(frozen=True)
class _Limits:
  """Tokens that go with a style of prompts: those of the recipes in configs/grpo_token.py."""

  written: int
  answered: int
  core: int
  records: int
  context: int
  session: int


DTYPES = ("float32", "bfloat16")
_STEP = 128  # lengths are padded to multiples of it: one question after another should not compile one program each
_COMPACT_LIMITS = _Limits(written=64, answered=32, core=128, records=512, context=1024, session=512)
_FULL_LIMITS = _Limits(written=512, answered=64, core=512, records=1024, context=4096, session=4096)


def load(
  policy: str | pathlib.Path | LanguageModel = "embedded:policy",
  answer: str | pathlib.Path | LanguageModel = "embedded:answer",
  prompts: Prompts | None = None,
  *,
  top_k: int = 10,
  dtype: str = "float32",
) -> "Agent":
  """Loads a policy and an answer model.

  Args:
    policy: what `io.models.load` takes (embedded:policy, a folder, a .gguf file, a name of the manifest, a hub id), or
      a model that is loaded already.
    answer: the same. With the policy's tokenizer it reads the policy's own tokens, else their text.
    prompts: None takes those that the models are made for: short ones for models with the shipped tokenizer, full
      instructions for all others.
    top_k: records that a question is answered from, beside core memory.
    dtype: of the computation.

  Raises:
    ValueError: a model cannot be found or read, or an argument is out of range.
  """
  for name, given in (("policy", policy), ("answer", answer)):
    check_model(name, given)
  check_prompts(prompts)
  checks.whole("top_k of load", top_k, 1)
  checks.choice("dtype of load", dtype, DTYPES)
  writing = _model(policy)
  answering = writing if answer is policy or answer == policy else _model(answer)
  limits, answer_limits = _limits(writing), _limits(answering)
  writer = Writer(
    writing,
    prompts or own_prompts(writing),
    Sampling(limits.written, temperature=0.0),
    Bm25(top_k=2 * top_k),
    core_budget=limits.core,
    records_budget=limits.records,
    chat=Chat(writing.tokenizer),
    dtype=dtype,
    step=_STEP,
  )
  reader = Reader(
    answering,
    prompts or own_prompts(answering),
    Bm25(top_k),
    max_context=min(answer_limits.context, answering.config.max_positions // 2),
    max_new_tokens=answer_limits.answered,
    dtype=dtype,
    step=_STEP,
    writer=writing.tokenizer,
  )
  return Agent(writer, reader, min(limits.session, writing.config.max_positions // 2))


def check_model(name: str, spec: object) -> None:
  """Raises ValueError where an argument is neither a model nor what may name one."""
  if not isinstance(spec, str | pathlib.Path | LanguageModel):
    raise ValueError(
      f"{name} is {checks.shown(spec)}: give a name, a path or a loaded model, such as 'embedded:answer'"
    )


def check_prompts(prompts: object) -> None:
  """Raises ValueError where an argument is neither `Prompts` nor None."""
  if prompts is not None and not isinstance(prompts, Prompts):
    raise ValueError(
      f"prompts is {checks.shown(prompts)}: give memory.prompts.COMPACT or FULL, Prompts of yours, or None"
    )


def check_attribution(
  where: str,
  *,
  gradients: int,
  masks: int | None,
  scorer: str | None,
  keep: float,
  penalty: str,
  alpha: float,
  seed: int,
) -> tuple[int, str]:
  """Raises ValueError where an argument of an attribution is out of range; (masks, scorer) with defaults put in."""
  checks.whole(f"gradients of {where}", gradients, 0, len(LEVELS))
  if masks is None:
    masks = 8 if gradients else 256
  checks.whole(f"masks of {where}", masks, 2)
  if scorer is None:
    scorer = Scorer.MASKED if gradients else Scorer.CACHED
  checks.real(f"keep of {where}", keep, 0, 1)
  scorers = [s for s in Scorer if not (gradients and s is Scorer.EXACT)]
  checks.choice(f"scorer of {where}" + (" with gradients" if gradients else ""), scorer, scorers)
  checks.choice(f"penalty of {where}", penalty, Penalty)
  checks.real(f"alpha of {where}", alpha, 0)
  checks.whole(f"seed of {where}", seed, 0, checks.SEEDS)
  return masks, scorer


def _model(spec: str | pathlib.Path | LanguageModel) -> LanguageModel:
  return spec if isinstance(spec, LanguageModel) else models.load(str(spec))


def own_prompts(model: LanguageModel) -> Prompts:
  """The prompts that a model is made for: short ones with the shipped tokenizer, full instructions for all others."""
  return COMPACT if model.tokenizer.fingerprint == _shipped_vocabulary() else FULL


def _limits(model: LanguageModel) -> _Limits:
  return _COMPACT_LIMITS if own_prompts(model) is COMPACT else _FULL_LIMITS


@functools.cache
def _shipped_vocabulary() -> str:
  return Tokenizer.load(models.SHIPPED_TOKENIZER).fingerprint


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Agent:
  """A policy and an answer model with all their settings.

  Attributes:
    writer: how memories are written; `dataclasses.replace` gives other budgets, modules or prompts.
    reader: how questions are answered.
    session_tokens: sessions with longer prompts are read in parts.
  """

  writer: Writer
  reader: Reader
  session_tokens: int

  def write(self, history: History | Sequence[Session] | Sessions, temperature: float = 0.0, seed: int = 0) -> "Memory":
    """Writes the memory of a conversation.

    Args:
      history: a `History`, a list of `Session`, or plain (date, [(speaker, text), …]) pairs in time order.
      temperature: 0 writes what is likeliest; 1 is how the policy was trained.
      seed: of the draws, 0 to 2³² - 1.

    Raises:
      ValueError: `history` is none of these, or its dates are malformed or not in order; or a number is out of range.
    """
    checks.real("temperature of Agent.write", temperature, 0, closed=True)
    checks.whole("seed of Agent.write", seed, 0, checks.SEEDS)
    chat = self._chat()
    read, _ = fit_history(chat, self.writer.prompts, as_history(history), self.session_tokens, Overflow.SPLIT)
    sampling = dataclasses.replace(self.writer.sampling, temperature=temperature)
    writer = dataclasses.replace(self.writer, sampling=sampling, chat=chat)
    window = Window(read, 0, 0, len(read.sessions))
    return Memory(self, write(writer, [window], 1, jax.random.key(seed))[0][0])

  def _chat(self) -> Chat:
    return self.writer.chat or Chat(self.writer.model.tokenizer)

  def __repr__(self) -> str:
    return f"Agent: policy {_described(self.writer.model)}, answer model {_described(self.reader.model)}"

  def _repr_html_(self) -> str:
    rows = [("policy", self.writer.model), ("answer model", self.reader.model)]
    cells = [(role, html.escape(m.name), f"{_size(m):,}", f"{m.config.max_positions:,}") for role, m in rows]
    return html.card("Agent", html.table(("", "model", "parameters", "positions"), cells))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Memory:
  """What the policy wrote of one conversation.

  Attributes:
    agent: who wrote it and answers from it.
    rollout: every call with its prompt and completion, and the bank that they left.
  """

  agent: Agent
  rollout: Rollout

  @property
  def bank(self) -> Bank:
    return self.rollout.bank

  @property
  def records(self) -> tuple[Record, ...]:
    """The records that hold now, in order of writing."""
    return self.rollout.bank.current()

  def ask(self, question: str | Question, date: str = "") -> "Reply":
    """Asks the answer model, which reads nothing but the retrieved records.

    Args:
      question: a text, or a `Question` of a data set.
      date: the day of asking, which "how long ago" counts from, as 2024-03-04 or 2024-03-04T18:30; a `Question` brings
        its own.

    Raises:
      ValueError: the question is no text, empty, or too long for the answer model, or a date is not ISO 8601.
    """
    date = dates.iso("Memory.ask", date)
    if isinstance(question, str):
      question = Question("asked", question.strip(), (), "", date=date)
    if not isinstance(question, Question):
      raise ValueError(f"the question given to Memory.ask is {checks.shown(question)}: give a text or a Question")
    if not checks.text("the question given to Memory.ask", question.text).strip():
      raise ValueError("the question given to Memory.ask is empty: ask something")
    question = dataclasses.replace(question, date=dates.iso("the question given to Memory.ask", question.date))
    history = self.rollout.window.history.id
    ((answer,),) = ask(self.agent.reader, [(self.bank, [question], (history, self.rollout.index))])
    return Reply(self, answer)

  def __repr__(self) -> str:
    sessions = len(self.rollout.window.history.sessions)
    lines = [f"#{r.id} [{r.module}] {f'({r.date}) ' if r.date else ''}{r.text}" for r in self.records]
    head = f"Memory of {_plural(sessions, 'session')}: {_plural(len(lines), 'record')}, "
    return "\n".join([head + _plural(sum(len(r.ids) for r in self.records), "token"), *lines])

  def _repr_html_(self) -> str:
    head, *_ = repr(self).split("\n", 1)
    rows = [_record_cells(record, html.escape(record.text)) for record in self.records]
    content = html.table(("", "memory", "date", "record"), rows) if rows else "The policy wrote no record."
    return html.card(head, content)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reply:
  """One answer, with the memory that it comes from. `answer` holds the prompt, the context and the ids."""

  memory: Memory
  answer: Answer

  @property
  def text(self) -> str:
    return self.answer.text

  @property
  def records(self) -> tuple[Record, ...]:
    """What the answer model read."""
    return self.answer.context.records

  def attribute(
    self,
    gradients: int = 5,
    *,
    masks: int | None = None,
    scorer: str | None = None,
    keep: float = 0.5,
    penalty: str = "held_out",
    alpha: float = 0.01,
    seed: int = 0,
    part: str = "",
  ) -> "Explanation":
    """Measures which of the policy's tokens the answer leaned on.

    Args:
      gradients: at how many levels of faintness, 1 to 5, derivatives by every token are taken; 0 fits a LASSO to random
        masks instead.
      masks: contexts with random tokens left out under which the answer is scored; None takes 8, which give gradients
        their scale, and 256 without gradients.
      scorer: "exact" removes tokens from the text (not with gradients), "masked" hides them, "cached" hides them in one
        reading of the text; None is masked with gradients and cached without.
      keep: probability that a token stays under a random mask.
      penalty: how `alpha` is meant: "raw", "context_cite", "relative" or "held_out" (see `attribution.lasso.Penalty`).
      alpha: of the LASSO, > 0; larger values leave fewer tokens with a weight.
      seed: of the masks, 0 to 2³² - 1.
      part: explains only these words of the answer, given those before them; "" explains the whole.

    Raises:
      ValueError: the context holds no token of the policy, or an argument is out of range.
    """
    masks, scorer = check_attribution(
      "Reply.attribute",
      gradients=gradients,
      masks=masks,
      scorer=scorer,
      keep=keep,
      penalty=penalty,
      alpha=alpha,
      seed=seed,
    )
    answer, reader = self.answer, self.memory.agent.reader
    if not answer.context.sources:
      raise ValueError(
        "the answer was given without any record, so there is nothing to attribute it to: write more first"
      )
    problem = Problem(answer.prompt, answer.source, answer.context.sources, answer.completion.ids, (seed,))
    if part:
      problem = part_of(problem, *find(reader.model.tokenizer.pieces(problem.answer), part))
    header = answer_prefix(Chat(reader.model.tokenizer), reader.prompts)
    measured = measure(
      reader.model,
      header,
      [problem],
      masks,
      gradients=gradients,
      keep=keep,
      scorer=scorer,
      dtype=reader.dtype,
      step=reader.step,
    )
    (attribution,) = fit(measured, alpha=alpha, penalty=penalty)
    return Explanation(self, attribution)

  def __repr__(self) -> str:
    return f"{self.answer.question.text}\n→ {self.text or '(empty)'}  (from {_plural(len(self.records), 'record')})"

  def _repr_html_(self) -> str:
    rows = [_record_cells(record, html.escape(record.text)) for record in self.records]
    return html.card(self.answer.question.text, self._said() + html.table(("read", "memory", "date", "record"), rows))

  def _said(self) -> str:
    gold = self.answer.question.answers
    return html.said(self.text, f"(right: {' / '.join(gold)})" if gold else "")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explanation:
  """Weights of the policy's tokens for one answer: the logits of its probability that each of them is worth."""

  reply: Reply
  attribution: Attribution

  @property
  def weights(self) -> np.ndarray:
    """float32 [S], in order of `reply.answer.context.sources`."""
    return self.attribution.weights

  def of(self, record: Record) -> list[float | None]:
    """The weight of each of a record's tokens; None where the token was not written by the policy in this rollout."""
    known = {
      (source.owner, source.position + i): weight * share
      for source, weight in zip(self.attribution.problem.sources, self.weights.tolist(), strict=True)
      for i, share in enumerate(source.shares)
    }
    if record.owner is None:
      return [None] * len(record.ids)
    return [known.get((record.owner, record.start + i)) for i in range(len(record.ids))]

  def top(self, count: int = 5) -> list[tuple[str, float, int]]:
    """The heaviest pieces of text as (text, weight, id of the record), largest magnitude first; zeros are left out.

    Tokens that make up one character are one piece, with the sum of their weights.
    """
    checks.whole("count of top", count, 0)
    found = []
    for record in self.reply.records:
      weights = self.of(record)
      for piece in pieces(self._bytes(record)):
        weight = sum(w or 0.0 for w in weights[piece.start : piece.stop])
        if weight:
          found.append((piece.text, weight, record.id))
    return sorted(found, key=lambda entry: -abs(entry[1]))[:count]

  def _bytes(self, record: Record) -> list[bytes]:
    return self.reply.memory.agent.writer.model.tokenizer.pieces(record.ids)

  def __repr__(self) -> str:
    used = f"{np.count_nonzero(self.weights)} of {_plural(len(self.weights), 'token')} have a weight"
    lines = [f"{weight:+8.3f}  {text!r} in #{record}" for text, weight, record in self.top()]
    return "\n".join([f"{self.reply!r}", f"{used} ({self.attribution.measured}):", *lines])

  def _repr_html_(self) -> str:
    scale = html.largest(self.weights.tolist())
    rows = []
    for record in self.reply.records:
      weights = self.of(record)
      text = html.box(html.tokens(self._bytes(record), weights, scale=scale, name="attribution"))
      rows.append((*_record_cells(record, text), f"{sum(w or 0.0 for w in weights):+.2f}"))
    meaning = {"up": "made this answer likelier", "down": "made it less likely", "none": "not the policy's"}
    table = html.table(("read", "memory", "date", "record", "sum"), rows)
    return html.card(self.reply.answer.question.text, self.reply._said() + html.legend(scale, **meaning) + table)


def as_history(sessions: History | Sequence[Session] | Sessions, name: str = "conversation") -> History:
  """A `History` of what a caller has at hand, with every date as `data.dates.iso` writes it.

  Raises:
    ValueError: there is no session, one is malformed or empty, a text is no Unicode, a date is not ISO 8601, or they
      are not in time order.
  """
  given = sessions.sessions if isinstance(sessions, History) else sessions
  if isinstance(given, str | bytes) or not isinstance(given, Sequence):
    raise ValueError(f"a history is a {type(given).__name__}: give a list of (date, [(speaker, text), …]) pairs")
  if not given:
    raise ValueError("the history has no session: give at least one (date, [(speaker, text), …]) pair")
  built = tuple(_session(f"session {i + 1} of the history", i, session) for i, session in enumerate(given))
  dated = [session for session in built if session.date]
  timed = [session for session in dated if "T" in session.date]
  for one, other in (*itertools.pairwise(dated), *itertools.pairwise(timed)):
    shared = min(len(one.date), len(other.date))  # a day without a time may stand before or after any time of that day
    if other.date[:shared] < one.date[:shared]:
      raise ValueError(f"session {other.id} of {other.date} comes after one of {one.date}: sort the history by date")
  return History(checks.text("the id of the history", sessions.id if isinstance(sessions, History) else name), built)


def _session(where: str, index: int, given: object) -> Session:
  if not isinstance(given, Session):
    given = _read_session(where, index, given)
  checks.text(f"the id of {where}", given.id)
  if not isinstance(given.turns, Sequence) or not all(isinstance(turn, Turn) for turn in given.turns):
    raise ValueError(f"the turns of {where} are {checks.shown(given.turns)}: give a tuple of Turn")
  if not given.turns:
    raise ValueError(f"{where} has no lines: leave it out")
  for number, turn in enumerate(given.turns, 1):
    for field in ("speaker", "text", "id"):
      checks.text(f"the {field} of line {number} in {where}", getattr(turn, field))
  return Session(given.id, dates.iso(where, given.date), tuple(given.turns))


def _read_session(where: str, index: int, given: Any) -> Session:
  """A session of a plain (date, [(speaker, text), …]) pair, of which only the shape is checked."""
  match given:
    case [date, [*lines]] if all(isinstance(line, tuple | list) and len(line) == 2 for line in lines):
      if all(isinstance(part, str) for line in lines for part in line):
        turns = tuple(Turn(speaker, text, f"S{index + 1}:{t + 1}") for t, (speaker, text) in enumerate(lines))
        return Session(f"S{index + 1}", date, turns)
  raise ValueError(f"{where} is {checks.shown(given)}: give (date, [(speaker, text), …]), all of them strings")


def _record_cells(record: Record, text: str) -> tuple[str, str, str, str]:
  return f"#{record.id}", str(record.module), html.escape(record.date), text


def _size(model: Model) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(model.params))


def _described(model: Model) -> str:
  return f"{model.name} ({_size(model):,} parameters)"


def _plural(count: int, noun: str) -> str:
  return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
