"""The budget of passages against a plain loop, and an answer model that reads common passages once."""

import random
import types

import jax
import numpy as np
import pytest

from attrimem_jax.evaluation.asking import Decoder, fit
from attrimem_jax.memory.prompts import COMPACT
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.rollout.answering import Reader
from attrimem_jax.systems.protocol import Passage
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import Question
from tests.memory.conftest import TOKENIZER
from tests.nn import oracle

CHAT = Chat(TOKENIZER)


@pytest.fixture(scope="module")
def decoder():
  config = DecoderConfig(TOKENIZER.vocab_size, 16, 2, 4, 2, 6, 24, rope_theta=1e4, max_positions=128)
  model = types.SimpleNamespace(
    name="tiny", config=config, params=jax.device_put(oracle.draw(config)), tokenizer=TOKENIZER
  )
  return Decoder(Reader(model, COMPACT, Bm25(), max_context=24, max_new_tokens=6), CHAT)


def _plain(lengths, budget):
  used, count = 0, 0
  for length in lengths:
    if used + length > budget:
      break
    used, count = used + length, count + 1
  if not count and lengths and budget > 0:
    return 1, budget, sum(lengths) - budget
  return count, lengths[0] if lengths and count else 0, sum(lengths[count:])


def test_fit_by_hand():
  assert fit([5, 3, 9, 1], 10) == (2, 5, 10)
  assert fit([12, 1], 10) == (1, 10, 3)
  assert fit([12, 1], 0) == (0, 0, 13)
  assert fit([], 10) == (0, 0, 0)


def test_fit_is_the_plain_loop():
  rng = random.Random(0)
  for _ in range(300):
    lengths, budget = [rng.randint(1, 9) for _ in range(rng.randint(0, 8))], rng.randint(0, 30)
    assert fit(lengths, budget) == _plain(lengths, budget), (lengths, budget)


def _ask(decoder, passages, whole=False):
  questions = [Question(f"q{i}", text, (), "") for i, text in enumerate(("tea", "Lisbon"))]
  return decoder.answer(questions, passages, whole)


def test_passages_that_all_questions_share_give_the_answers_they_give_apart(decoder):
  shared = (Passage("Ann drinks tea", "2024-03-01", 1), Passage("Bob", "", 0))
  together = _ask(decoder, [shared, shared], True)
  apart = [_ask(decoder, [shared, shared[:1]], True)[0], _ask(decoder, [shared[:1], shared], True)[1]]
  assert [(r.text, r.read, r.written, r.shown) for r in together] == [
    (r.text, r.read, r.written, r.shown) for r in apart
  ]
  assert together[0].shown == (1, 0)  # in the order of time


def test_the_budget_is_kept_and_what_is_left_out_is_counted(decoder):
  passages = [tuple(Passage(f"Ann drinks tea {i}", "", i) for i in range(9))] * 2
  nothing, some, all_ = (_ask(decoder, p, w)[0] for p, w in (([(), ()], False), (passages, False), (passages, True)))
  line = len(TOKENIZER.encode("Ann drinks tea 0\n"))
  assert some.read - nothing.read <= 24 < some.read - nothing.read + line
  assert all_.read + 6 <= 128
  assert len(some.shown) * line + some.left_out == 9 * line == len(all_.shown) * line + all_.left_out


def test_the_best_passage_alone_is_cut(decoder):
  reply = _ask(decoder, [(Passage("tea " * 99),), ()])[0]
  assert reply.shown == (0,)
  assert reply.read - _ask(decoder, [(), ()])[0].read == 24
  assert np.isfinite(reply.left_out)
  assert reply.left_out > 0


def test_no_question_asks_nothing(decoder):
  assert decoder.answer([], [], False) == []
