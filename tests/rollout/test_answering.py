"""Asking about banks: which records an answer is given, whose tokens they are, and that company changes no answer."""

import types

import numpy as np
import pytest

from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import Source, answer_prefix
from attrimem_jax.memory.prompts import COMPACT
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.rollout import answering
from attrimem_jax.rollout.answering import Reader, ask
from attrimem_jax.rollout.sampling import Completion
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import CallKey, Finish, Module, Question, Record
from tests.memory.conftest import TOKENIZER
from tests.nn import oracle

CHAT = Chat(TOKENIZER)


def bank_of(*texts: str, rollout: int = 0, module: Module = Module.SEMANTIC) -> Bank:
  """Records with even ids were written by this rollout's second session, the others were given."""
  records = [
    Record(
      i,
      module,
      text,
      tuple(TOKENIZER.encode(" " + text)),
      "2024-03-04",
      CallKey("h", rollout, 1, module) if i % 2 == 0 else None,
      10 * i,
    )
    for i, text in enumerate(texts, 1)
  ]
  return Bank(tuple(records), len(records) + 1)


def question(text: str, number: int = 0) -> Question:
  return Question(f"q{number}", text, ("x",), "single", (), "2024-03-09")


FACTS = ("Ann lives in Lisbon", "Bob lives in Porto", "Ann drinks tea")
QUESTIONS = [question("Who lives in Porto", 0), question("tea", 1), question("A much longer one: where is Ann now", 2)]


@pytest.fixture
def echoing(monkeypatch):
  """A sampler whose answer is the prompt's own length; it logs (prompts, rows) of its calls."""

  def complete(model, prefixes, prompts, keys, sampling, *, rows, **_):
    assert prefixes == [answer_prefix(CHAT, COMPACT)]
    assert sampling.temperature == 0
    seen.append((prompts[0], rows))
    rows_said = [np.array([*TOKENIZER.encode(f" {len(p)} \n"), TOKENIZER.stop_ids[0]]) for p in prompts[0]]
    return [[Completion(said, np.zeros(len(said)), Finish.STOP) for said in rows_said]]

  seen: list = []
  monkeypatch.setattr(answering, "complete", complete)
  return seen


def reader(top_k: int = 10, **options) -> Reader:
  model = types.SimpleNamespace(tokenizer=TOKENIZER)
  return Reader(model, COMPACT, Bm25(top_k), **options)


def test_answers_come_back_in_order_whatever_their_width(echoing):
  items = [(bank_of(*FACTS[:k]), QUESTIONS, None) for k in (3, 0, 1)] * 12
  answers = ask(reader(token_budget=200), items)
  assert [[a.question for a in group] for group in answers] == [QUESTIONS] * 36
  assert all(a.text == str(len(a.prompt)) for group in answers for a in group)
  assert sum(len(prompts) for prompts, _ in echoing) == 108
  assert len(echoing) > 2, "several widths"
  assert all(len(prompts) <= rows for prompts, rows in echoing)


def test_text_is_without_stop_token_and_blanks(echoing):
  ((answer,),) = ask(reader(), [(bank_of("tea"), QUESTIONS[:1], None)])
  assert answer.text.isdigit()
  assert answer.completion.ids[-1] in TOKENIZER.stop_ids


def test_a_batch_keeps_to_its_budget(echoing):
  ask(reader(token_budget=1), [(bank_of("tea"), QUESTIONS * 3, None)])
  assert all(len(prompts) <= 8 for prompts, _ in echoing), "never fewer rows than the smallest bucket"
  assert sum(len(prompts) for prompts, _ in echoing) == 9


def test_the_best_records_are_read_and_core_memory_always(echoing):
  core = bank_of("Ann: seat 3", module=Module.CORE).records[0]
  facts = [Record(r.id + 1, r.module, r.text, r.ids) for r in bank_of(*FACTS).records]
  ((answer,),) = ask(reader(top_k=1), [(Bank((core, *facts), 9), QUESTIONS[:1], None)])
  assert [r.text for r in answer.context.records] == ["Ann: seat 3", "Bob lives in Porto"]


def test_a_context_keeps_to_its_budget_best_first(echoing):
  one_line = len(TOKENIZER.encode("#2 Bob lives in Porto\n"))
  ((answer,),) = ask(reader(top_k=2, max_context=one_line), [(bank_of(*FACTS), QUESTIONS[:1], None)])
  assert [r.text for r in answer.context.records] == ["Bob lives in Porto"]


def test_sources_are_the_rollouts_own_tokens(echoing):
  bank = bank_of(*FACTS, rollout=2)
  mine, others, all_of_them = (
    ask(reader(), [(bank, QUESTIONS[:1], rollout)])[0][0] for rollout in (("h", 2), ("h", 1), None)
  )
  record = bank.records[1]
  assert mine.context.sources == tuple(Source(record.owner, 20 + i) for i in range(len(record.ids)))
  assert [int(i) for i, s in zip(mine.prompt, mine.source, strict=True) if s >= 0] == list(record.ids)
  assert others.context.sources == ()
  assert (others.source == -1).all()
  assert all_of_them.context.sources == mine.context.sources
  np.testing.assert_array_equal(mine.prompt, others.prompt)


def test_an_empty_bank_is_asked_too(echoing):
  ((answer,),) = ask(reader(), [(Bank.empty(), QUESTIONS[:1], ("h", 0))])
  assert answer.context.records == ()
  assert (answer.source == -1).all()
  assert ask(reader(), [(Bank.empty(), [], None)]) == [[]]


def test_a_real_network_gives_the_greedy_answer_in_any_company(writer_model):
  """The likeliest tokens by a plain decoder; one row alone, and the same row among others."""
  model = writer_model
  real = Reader(model, COMPACT, Bm25(2), max_new_tokens=6, step=64)
  bank = bank_of("tea")
  ((alone,),) = ask(real, [(bank, QUESTIONS[1:2], None)])
  (among,) = ask(real, [(bank, QUESTIONS, None)])
  ids = [*answer_prefix(CHAT, COMPACT), *alone.prompt]
  for token in alone.completion.ids:
    assert token == oracle.logits(model.config, model.params, ids)[-1].argmax()
    ids.append(token)
  np.testing.assert_array_equal(alone.completion.ids, among[1].completion.ids)
