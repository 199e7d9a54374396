"""Models by name: the shipped ones, folders, GGUF files, the manifest, the hub."""

import dataclasses
import importlib.resources
import pathlib

from attrimem_jax.io import huggingface
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
  """A decoder with its parameters and its tokenizer."""

  name: str
  config: DecoderConfig
  params: decoder.Params
  tokenizer: Tokenizer


def load(spec: str) -> LanguageModel:
  """Loads `embedded:policy`, `embedded:answer` or a folder."""
  folder = pathlib.Path(spec)
  if spec.startswith("embedded:"):
    folder = pathlib.Path(str(importlib.resources.files("attrimem_jax"))) / "assets" / spec.partition(":")[2]
  config, params = huggingface.read(folder)
  return LanguageModel(spec, config, params, Tokenizer.load(folder))
