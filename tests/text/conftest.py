"""A tokenizer of Qwen's kind, small enough to be written out here: 256 bytes, a few merges, the same control tokens."""

import json
import pathlib
from collections.abc import Callable

import pytest

from attrimem_jax.text.tokenizer import Tokenizer, byte_alphabet

MERGES = [
  *(("e", "r"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("l", "l"), ("he", "ll"), ("hell", "o")),
  *(("Ċ", "Ċ"), ("u", "s"), ("us", "er"), ("ð", "Ł"), ("<", "|"), ("|", ">")),
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>")
WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

HYBRID = """{%- for message in messages %}
{%- set text = message.content %}
{%- if message.role == 'assistant' and '</think>' in text %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
NEVER = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
ALWAYS = NEVER.replace("assistant\\n", "assistant\\n<think>\\n")


def spec(added: tuple[str, ...] = SPECIAL + PLAIN_ADDED) -> dict:
  names = [*byte_alphabet(), *(a + b for a, b in MERGES)]
  split = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
  level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
  flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  return {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
      {"id": len(names) + i, "content": name, "special": name in SPECIAL, **flags} for i, name in enumerate(added)
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": "",
      "end_of_word_suffix": "",
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": False,
      "vocab": {name: i for i, name in enumerate(names)},
      "merges": [list(pair) for pair in MERGES],
    },
  }


SETTINGS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


@pytest.fixture
def tokenizer() -> Tokenizer:
  """A hybrid thinker, as Qwen3-0.6B is."""
  return Tokenizer(spec(), SETTINGS | {"chat_template": HYBRID})


@pytest.fixture
def make(tmp_path: pathlib.Path) -> Callable[..., Tokenizer]:
  """Writes a tokenizer with another template or other added tokens to `tmp_path` and loads it."""

  def build(template: str | None, added: tuple[str, ...] = SPECIAL + PLAIN_ADDED) -> Tokenizer:
    settings = SETTINGS | ({"chat_template": template} if template else {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec(added)))
    (tmp_path / "tokenizer_config.json").write_text(
      json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    )
    return Tokenizer.load(tmp_path)

  return build


@pytest.fixture
def templates() -> dict[str, str]:
  return {"hybrid": HYBRID, "never": NEVER, "always": ALWAYS}


@pytest.fixture
def raw_spec() -> dict:
  return spec()
