"""Language models by name: the embedded ones, folders, GGUF files, the manifest's and Hugging Face's.

    embedded:policy          shipped with the package
    runs/mine/export         a Hugging Face folder
    models/smollm2.gguf      a GGUF file
    smollm2-135m-instruct    a name in third_party/models.toml
    Qwen/Qwen3-0.6B          a repository of Hugging Face

`check` is cheap and finds a misspelt or unusable spec before any work starts; `resolve` finds or fetches the files;
`load` reads them.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from typing import Any

import huggingface_hub
import jax
from absl import logging

from attrimem_jax.io import gguf, huggingface
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params
from attrimem_jax.text.tokenizer import Tokenizer

_PACKAGE = pathlib.Path(__file__).parents[1]
ASSETS = _PACKAGE / "assets"
EMBEDDED = ("policy", "answer")
# In a checkout the manifest lies beside the package, in a wheel inside of it.
MANIFESTS = (_PACKAGE.parent / "third_party" / "models.toml", _PACKAGE / "third_party" / "models.toml")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
  """A decoder with its parameters and tokenizer: policy, reference, answer model and embedder are all of this kind."""

  name: str
  config: DecoderConfig
  params: Params
  tokenizer: Tokenizer


def load(spec: str, *, place: Callable[[Params], Params] = jax.device_put) -> LanguageModel:
  """Finds, fetches if need be, and reads a model.

  Args:
    spec: one of the forms above.
    place: puts the float32 parameters, NumPy arrays at first, on devices; give one with shardings for large models.

  Raises:
    ValueError: says what is wrong with the spec or with the files it leads to.
  """
  path = resolve(spec)
  if path.is_file():
    config, params, tokenizer = gguf.read(path)
  else:
    tokenizer = Tokenizer.load(tokenizer_folder(path))
    config, params = huggingface.read(path)
  _require_rows(config, tokenizer, spec)
  return LanguageModel(spec, config, place(params), tokenizer)


def load_tokenizer(spec: str) -> Tokenizer:
  """The tokenizer of a model, without its weights."""
  path = resolve(spec)
  return gguf.read_tokenizer(path) if path.is_file() else Tokenizer.load(tokenizer_folder(path))


def load_config(spec: str) -> DecoderConfig:
  """The sizes of a model, without its weights."""
  path = resolve(spec)
  return gguf.read_config(path) if path.is_file() else huggingface.read_config(path)


def check(spec: str) -> None:
  """Raises ValueError where `load(spec)` could not work; reads configurations, no weights, and downloads nothing."""
  if not is_local(spec):
    if huggingface_hub.constants.HF_HUB_OFFLINE and _hub_of(spec):
      resolve(spec)
    return
  path = resolve(spec) if _is_ready(spec) else None
  if path is None:
    return
  if path.is_file():
    _require_rows(gguf.read_config(path), gguf.read_tokenizer(path), spec)
    return
  config = huggingface.read_config(path)
  huggingface.weight_files(path)
  _require_rows(config, Tokenizer.load(tokenizer_folder(path)), spec)
