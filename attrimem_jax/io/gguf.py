"""GGUF files (llama.cpp's format) to parameters and a tokenizer.

Quantised weights become float32. Two conventions differ from Hugging Face's: files of the `llama` architecture keep the
rows of q and k in pairs for their own rotary embedding, which is undone here; and the tokenizer lies in the file's
metadata, from which an ordinary `tokenizer.json` is built.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attrimem_jax.io import huggingface
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer, readable

TOP_NAMES = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types of the format

# How each family cuts text into words before the merges, as their own tokenizer.json files say it.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_QWEN_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, tuple[dict | None, list[dict]]] = {
  "smollm": (None, [{"type": "Digits", "individual_digits": True}, _BYTES | {"use_regex": True}]),
  "qwen2": (
    {"type": "NFC"},
    [
      {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False},
      _BYTES | {"use_regex": False},
    ],
  ),
}


def read(file: str | pathlib.Path) -> tuple[DecoderConfig, decoder.Params, Tokenizer]:
  """Reads one GGUF file into (config, float32 parameters on the host, tokenizer).

  Raises:
    ValueError: the file is no GGUF, or its architecture, quantisation or tokenizer is not supported.
  """
  fields, tensors = _open(file)
  config = config_of(fields, tensors, str(file))
  thunks = {_name(name, str(file)): _thunk(tensor, config, str(file)) for name, tensor in tensors.items()}
  return config, huggingface.assemble(config, thunks, str(file)), tokenizer_of(fields, str(file))


def read_config(file: str | pathlib.Path) -> DecoderConfig:
  """The sizes alone, without the weights."""
  return config_of(*_open(file), str(file))


def read_tokenizer(file: str | pathlib.Path) -> Tokenizer:
  """The tokenizer alone, without the weights."""
  return tokenizer_of(_open(file)[0], str(file))


def config_of(fields: Mapping[str, Any], tensors: Mapping[str, Any], source: str) -> DecoderConfig:
  """The decoder's sizes from the file's metadata. Raises ValueError naming what this decoder does not compute."""
  family = fields.get("general.architecture")

  def get(key: str, default: Any = None) -> Any:
    return fields.get(f"{family}.{key}", default)

  def need(key: str) -> Any:
    return fields[f"{family}.{key}"]

  try:
    heads, width = need("attention.head_count"), need("embedding_length")
    hf = {
      "model_type": family,
      "vocab_size": int(tensors["token_embd.weight"].shape[1]),
      "hidden_size": width,
      "num_hidden_layers": need("block_count"),
      "num_attention_heads": heads,
      "num_key_value_heads": get("attention.head_count_kv", heads),
      "head_dim": get("attention.key_length") or width // heads,
      "intermediate_size": need("feed_forward_length"),
      "rms_norm_eps": _short(need("attention.layer_norm_rms_epsilon")),
      "rope_theta": _short(get("rope.freq_base", 1e4)),
      "tie_word_embeddings": "output.weight" not in tensors,
      "max_position_embeddings": need("context_length"),
      "use_sliding_window": bool(get("attention.sliding_window")),
    }
  except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
    raise ValueError(
      f"{source} lacks metadata of a decoder, or they are damaged ({error}); its architecture is {family!r}"
    ) from None
  if (scaling := get("rope.scaling.type", "none")) != "none":
    hf["rope_parameters"] = {"rope_type": scaling, "rope_theta": hf["rope_theta"]}
  try:
    return DecoderConfig.from_hf(hf)
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from None


def tokenizer_of(fields: Mapping[str, Any], source: str) -> Tokenizer:
  """A byte-level BPE tokenizer from the file's metadata. Raises ValueError for any other kind."""
  with readable(source):
    return _tokenizer_of(fields, source)


def _tokenizer_of(fields: Mapping[str, Any], source: str) -> Tokenizer:
  kind, words = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
  if kind != "gpt2" or not isinstance(words, str) or words not in PRE_TOKENIZERS:
    raise ValueError(
      f"the tokenizer of {source} is {kind!r} with pre-tokenizer {words!r}; supported are 'gpt2' with "
      f"{', '.join(map(repr, PRE_TOKENIZERS))}: use the Hugging Face folder of the model instead"
    )
  names, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
  added = [
    {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    | {"special": types[i] == _CONTROL}
    for i, name in enumerate(names)
    if types[i] in (_CONTROL, _USER_DEFINED)
  ]
  normalizer, steps = PRE_TOKENIZERS[words]
  spec = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": added,
    "normalizer": normalizer,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
      "type": "BPE",
      "dropout": None,
      "unk_token": None,
      "continuing_subword_prefix": None,
      "end_of_word_suffix": None,
      "fuse_unk": False,
      "byte_fallback": False,
      "ignore_merges": False,
      # With the added tokens: other readers number those that are not in it anew, whatever id their entry states.
      "vocab": {name: i for i, name in enumerate(names) if types[i] != _UNUSED},
      "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
    },
  }
  return Tokenizer(spec, _settings(fields, names), source=source)


def require_package(source: str | pathlib.Path) -> Any:
  """The package that reads the format, an optional dependency. Raises ValueError where it is not installed."""
  try:
    import gguf
  except ImportError:
    raise ValueError(f"reading {source} needs the gguf package: pip install 'attrimem-jax[gguf]'") from None
  return gguf


def _settings(fields: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
  """What a tokenizer_config.json says; transformers reads the same names."""
  settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  for role, key in {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}.items():
    if (token := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
      settings[role] = names[token]
  return settings | {"chat_template": fields.get("tokenizer.chat_template")}


def _open(file: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
  """The metadata and the tensors, by name."""
  gguf = require_package(file)
  if not pathlib.Path(file).is_file():
    raise ValueError(f"no GGUF file at {file}; check the path")
  try:
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
  except Exception as error:  # the reader trusts every length that it reads, and fails on a wrong one in any way
    raise ValueError(f"{file} is not a whole GGUF file ({str(error)[:200]}); download it again") from error
  return fields, {tensor.name: tensor for tensor in reader.tensors}


def _name(name: str, source: str) -> str:
  """token_embd.weight → model.embed_tokens.weight, blk.3.attn_q.bias → model.layers.3.self_attn.q_proj.bias."""
  if name in TOP_NAMES:
    return TOP_NAMES[name]
  parts = name.split(".")
  if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
    raise ValueError(f"tensor {name} of {source} is none of this decoder's; the model needs what it does not compute")
  return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"


def _thunk(tensor: Any, config: DecoderConfig, source: str) -> Callable[[], np.ndarray]:
  def load() -> np.ndarray:
    from gguf.quants import dequantize

    try:
      array = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
      raise ValueError(
        f"tensor {tensor.name} of {source} is quantised as {tensor.tensor_type.name}, which cannot be read; "
        "use a file of another quantisation, such as Q8_0, or the Hugging Face folder"
      ) from None
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}.get(tensor.name.split(".")[-2])
    try:
      array = array.astype(np.float32, copy=False).reshape(tensor.shape[::-1])
      return unpair(array, heads) if heads and config.family == "llama" else array
    except ValueError as error:
      raise ValueError(f"tensor {tensor.name} of {source} does not fit its metadata ({error})") from None

  return load


def unpair(rows: np.ndarray, heads: int) -> np.ndarray:
  """Undoes the `llama` order of rows: within each head (0, h, 1, h + 1, …) → (0, 1, …, h, h + 1, …), h half a head."""
  return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _short(value: float) -> float:
  """Metadata are float32: 9.999999747378752e-06 was written as 1e-05."""
  return float(str(np.float32(value)))
