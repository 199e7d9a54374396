"""Tiny policies, and a sampler without a network for the tests that are about everything around it."""

import types
from collections.abc import Callable

import jax
import numpy as np
import pytest

from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.rollout.sampling import Completion
from attrimem_jax.types import Finish, History, Session, Turn
from tests.memory.conftest import TOKENIZER
from tests.nn import oracle

WORDS = ("Ann", "Bob", "tea", "Lisbon", "Porto")


@pytest.fixture(scope="session")
def writer_model():
  """A random network over the vocabulary of the tests' tokenizer."""
  config = DecoderConfig(TOKENIZER.vocab_size, 16, 2, 4, 2, 6, 24, rope_theta=1e4)
  return types.SimpleNamespace(name="tiny", config=config, params=oracle.draw(config), tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def history() -> History:
  sessions = [
    Session(f"s{i}", f"2024-03-0{i + 1}T09:00", (Turn("Ann", text, f"t{i}"),))
    for i, text in enumerate(("I live in Lisbon", "I drink tea", "Bob lives in Porto"))
  ]
  return History("h", tuple(sessions))


@pytest.fixture
def scripted() -> Callable:
  """Like `sampling.complete`: what a row says is a function of its prompt and its key alone. `seen` logs the calls."""

  def complete(model, prefixes, prompts, keys, sampling, *, rows=None, **_):
    seen.append(types.SimpleNamespace(prefixes=prefixes, prompts=prompts, keys=keys, rows=rows))
    return [[_say(model, prompt, keys[p, i]) for i, prompt in enumerate(group)] for p, group in enumerate(prompts)]

  seen: list = []
  complete.seen = seen
  return complete


def _say(model, prompt, key) -> Completion:
  rng = np.random.default_rng([*map(int, key), len(prompt)])
  text = f"ADD {' '.join(rng.choice(WORDS, 3))}\nnonsense"
  ids = np.array([*model.tokenizer.encode(text), model.tokenizer.stop_ids[0]], np.int32)
  return Completion(ids, rng.normal(size=len(ids)).astype(np.float32), Finish.STOP)


@pytest.fixture
def key() -> jax.Array:
  return jax.random.key(7)
