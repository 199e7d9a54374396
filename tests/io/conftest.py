"""A tokenizer of bytes only and tiny models of every family."""

import functools

import jax
import numpy as np
import pytest

from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer, byte_alphabet

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""


@pytest.fixture
def tokenizer() -> Tokenizer:
  """259 ids: 256 bytes and three control tokens."""
  spec = {
    "version": "1.0",
    "added_tokens": [
      {"id": 256 + i, "content": name, "special": True, "normalized": False}
      | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
      for i, name in enumerate(CONTROLS)
    ],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {name: i for i, name in enumerate(byte_alphabet())}, "merges": []},
  }
  return Tokenizer(spec, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE})


def tiny(family: str, **changes) -> DecoderConfig:
  """Head size times heads is not the width, as in Qwen3; sizes differ, so that a wrong transpose cannot fit."""
  switches = {"qk_norm": family == "qwen3", "qkv_bias": family == "qwen2"}
  head_size = 6 if family != "qwen2" else 4  # Qwen2 has no head_dim of its own
  sizes = {"width": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_size": head_size, "hidden": 20}
  rest = {"vocab_size": 259, "rope_theta": 5e4, "norm_eps": 1e-5, "max_positions": 64, "family": family}
  return DecoderConfig(**(sizes | switches | rest | changes))


def randomised(config: DecoderConfig, seed: int = 0) -> decoder.Params:
  """Parameters in which no norm is one and no bias is zero, so that a skipped tensor shows."""
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: draw.normal(0.0, 0.3, leaf.shape).astype(np.float32) + (len(leaf.shape) < 3), _shapes(config)
  )


@functools.cache
def _shapes(config: DecoderConfig) -> decoder.Params:
  return decoder.abstract(config)


@pytest.fixture(params=["qwen3", "qwen3-untied", "qwen2", "llama-untied"])
def model(request: pytest.FixtureRequest) -> tuple[DecoderConfig, decoder.Params]:
  family, _, untied = request.param.partition("-")
  config = tiny(family, tied=not untied)
  return config, randomised(config)


@pytest.fixture
def qwen3() -> tuple[DecoderConfig, decoder.Params]:
  config = tiny("qwen3")
  return config, randomised(config)
