"""The shape of a decoder, read from and written to a Hugging Face `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attrimem_jax import checks

ARCHITECTURES = {
  "qwen3": "Qwen3ForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "llama": "LlamaForCausalLM",
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and switches of a pre-norm, grouped-query, SwiGLU decoder.

  The families differ in two switches only: Qwen3 normalises every query and key head (`qk_norm`), Qwen2 adds biases to
  q, k and v (`qkv_bias`), Llama does neither. `tied` says that the output head is the embedding, transposed.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_size: int
  hidden: int
  rope_theta: float = 1e6
  norm_eps: float = 1e-6
  tied: bool = True
  qk_norm: bool = True
  qkv_bias: bool = False
  max_positions: int = 40960
  family: str = "qwen3"

  def __post_init__(self):
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_size", "hidden", "max_positions"):
      checks.whole(f"{name} in DecoderConfig", getattr(self, name), 1)
    checks.real("rope_theta in DecoderConfig", self.rope_theta, 0)
    checks.real("norm_eps in DecoderConfig", self.norm_eps, 0, closed=True)
    if self.heads % self.kv_heads:
      raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}) in DecoderConfig")
    if self.head_size % 2:
      raise ValueError(f"head_size ({self.head_size}) must be even in DecoderConfig: RoPE turns pairs")

  @classmethod
  def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
    """Reads the dict of a `config.json`.

    Raises:
      ValueError: names the key when the model needs something that this decoder does not compute.
    """
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
      raise ValueError(
        f"config.json: model_type {family!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
      )
    _refuse_unsupported(hf, family)
    heads, width = _size(hf, "num_attention_heads"), _size(hf, "hidden_size")
    return cls(
      vocab_size=_size(hf, "vocab_size"),
      width=width,
      layers=_size(hf, "num_hidden_layers"),
      heads=heads,
      kv_heads=_size(hf, "num_key_value_heads", heads),
      head_size=_size(hf, "head_dim", width // heads),
      hidden=_size(hf, "intermediate_size"),
      rope_theta=_number(_rope(hf) if _rope(hf).get("rope_theta") is not None else hf, "rope_theta", 1e4),
      norm_eps=_number(hf, "rms_norm_eps", 1e-6, closed=True),
      tied=_switch(hf, "tie_word_embeddings"),
      qk_norm=family == "qwen3",
      qkv_bias=family == "qwen2",
      max_positions=_size(hf, "max_position_embeddings", 2048),
      family=family,
    )

  def to_hf(self) -> dict[str, Any]:
    """The dict of a `config.json` that transformers loads as the same model."""
    hf = {
      "architectures": [ARCHITECTURES[self.family]],
      "model_type": self.family,
      "vocab_size": self.vocab_size,
      "hidden_size": self.width,
      "num_hidden_layers": self.layers,
      "num_attention_heads": self.heads,
      "num_key_value_heads": self.kv_heads,
      "head_dim": self.head_size,
      "intermediate_size": self.hidden,
      "hidden_act": "silu",
      "rms_norm_eps": self.norm_eps,
      "rope_theta": self.rope_theta,
      "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
      "tie_word_embeddings": self.tied,
      "max_position_embeddings": self.max_positions,
      "attention_bias": False,
    }
    if self.family == "qwen2":  # Qwen2 always has q/k/v biases and no such key
      del hf["attention_bias"]
    return hf


def _rope(hf: Mapping[str, Any]) -> Mapping[str, Any]:
  """transformers 5 keeps theta in `rope_parameters`, earlier releases beside it with an optional `rope_scaling`."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  if not isinstance(rope, Mapping):
    raise ValueError(
      f"config.json: the rotary parameters are {checks.shown(rope)}: make them an object, or leave them out"
    )
  return rope


def _size(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
  """A count of a `config.json`; null means the default, as in transformers."""
  value = default if hf.get(key) is None else hf[key]
  if value is None:
    raise ValueError(f"config.json lacks the key {key!r}; is it the configuration of a language model?")
  checks.whole(f"{key} of config.json", value, 1, 2**31 - 1)
  return value


def _number(hf: Mapping[str, Any], key: str, default: float, *, closed: bool = False) -> float:
  """A number above 0, or with `closed` 0 itself too."""
  value = default if hf.get(key) is None else hf[key]
  checks.real(f"{key} of config.json", value, 0, closed=closed)
  return float(value)


def _switch(hf: Mapping[str, Any], key: str) -> bool:
  value = False if hf.get(key) is None else hf[key]
  if not isinstance(value, bool):
    raise ValueError(f"{key} of config.json is {checks.shown(value)}: use true or false")
  return value


def _refuse_unsupported(hf: Mapping[str, Any], family: str) -> None:
  kind = _rope(hf).get("rope_type", _rope(hf).get("type", "default"))
  problems = {
    f"rope type {kind!r}": kind != "default",
    "use_sliding_window": bool(hf.get("use_sliding_window")),
    "attention_bias": bool(hf.get("attention_bias")) and family != "qwen2",
    "mlp_bias": bool(hf.get("mlp_bias")),
    f"hidden_act {hf.get('hidden_act')!r}": hf.get("hidden_act", "silu") not in ("silu", "swish"),
  }
  found = [name for name, present in problems.items() if present]
  if found:
    raise ValueError(
      f"config.json of a {family} model asks for {', '.join(found)}, which this decoder does not compute"
    )
