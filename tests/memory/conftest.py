"""A byte-level tokenizer whose whole tokens are listed here, so that a test can say which token holds which bytes."""

from collections.abc import Callable

import pytest

from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer, byte_alphabet
from attrimem_jax.types import CallKey, Module

WORDS = (
  *("ADD", "APPEND", "UPDATE", "MERGE", "DELETE", "SKIP", "REWRITE", "REPLACE"),
  *(" Ann", " Bob", " lives", " in", " Lisbon", " Porto", " tea", " #", "2024", "user", "assistant", "system"),
)
# Tokens across borders, as real vocabularies have them; encoding never yields them here, a policy may sample them.
ODD = (".\n", "\n\n", "\nADD", "n.\nSKIP")
CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")


def build_tokenizer() -> Tokenizer:
  letters = {byte: letter for letter, byte in byte_alphabet().items()}

  def spell(text: str) -> str:
    return "".join(letters[byte] for byte in text.encode())

  vocabulary, merges = list(byte_alphabet()), []
  for word in map(spell, WORDS):
    for i in range(1, len(word)):
      if word[: i + 1] not in vocabulary:
        vocabulary.append(word[: i + 1])
        merges.append([word[:i], word[i]])
  vocabulary += [spell(text) for text in ODD]
  plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
  spec = {
    "version": "1.0",
    "added_tokens": [{"id": len(vocabulary) + i, "content": name} | plain for i, name in enumerate(CONTROLS)],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "model": {
      "type": "BPE",
      "unk_token": None,
      "byte_fallback": False,
      "vocab": {name: i for i, name in enumerate(vocabulary)},
      "merges": merges,
    },
  }
  return Tokenizer(spec, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


TOKENIZER = build_tokenizer()
BY_BYTES = {TOKENIZER.bytes(i): i for i in range(TOKENIZER.vocab_size)}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
  return TOKENIZER


@pytest.fixture(scope="session")
def chat(tokenizer: Tokenizer) -> Chat:
  return Chat(tokenizer, thinking=None)


@pytest.fixture(scope="session")
def ids() -> Callable[..., list[int]]:
  """ids("ADD", " Ann", ".\\n") are the three tokens with these very bytes; a control token goes by its name."""

  def look_up(*tokens: str | bytes) -> list[int]:
    return [BY_BYTES[token if isinstance(token, bytes) else token.encode()] for token in tokens]

  return look_up


@pytest.fixture
def owner() -> CallKey:
  return CallKey("h", 0, 3, Module.SEMANTIC)
