"""Benchmarks as TFDS data sets: what is read back is what the benchmark's own reader makes of the file."""

import json
import subprocess
import sys

import pytest

from attrimem_jax.data import benchmarks, datasets
from attrimem_jax.types import Episode, History, Module, Note, Question, Session, Turn

TURNS = (Turn("Ann", "Hi\n\t👩\u200d👩\u200d👧", "D1:1"), Turn("", "", ""))
ODD = Episode(
  History("h/1 — é", (Session("s1", "2023-05-08T13:56", TURNS), Session("s2", "", ()))),
  (Question("q", "Who?", ("7", "a, b"), "kind", ("D1:1", "x"), "2023"), Question("r", "?", (), "kind")),
  (Note(1, Module.CORE, "n"), Note(0, Module.SEMANTIC, "ü")),
)


class _Reader:
  KINDS, NOTES = (), True

  @staticmethod
  def read(path):
    if path == "wrong":
      raise ValueError("wrong: it is no list")
    return (ODD, Episode(History("empty", (Session("s", "", ()),)), ()), ODD), None


@pytest.fixture
def odd(monkeypatch):
  monkeypatch.setattr(benchmarks, "READERS", {"odd": _Reader, "other": _Reader})


def test_odd_conversations_come_back_in_order(odd, tmp_path):
  folder = datasets.prepare("odd", "file", tmp_path)
  found = datasets.read(folder)
  assert len(found) == 3
  assert tuple(found) == _Reader.read("file")[0]
  assert found[-1] == ODD
  assert found[1:] == [found[1], ODD]
  with pytest.raises(IndexError):
    found[3]
  assert datasets.prepare("odd", "file", tmp_path) == folder, "again, nothing is to do"


def test_what_is_wrong_is_refused(odd, tmp_path):
  with pytest.raises(ValueError, match="no benchmark 'od': use odd, other"):
    datasets.prepare("od", "file", tmp_path)
  with pytest.raises(ValueError, match="it is no list"):
    datasets.prepare("odd", "wrong", tmp_path)
  assert not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match="holds no conversations that were prepared here"):
    datasets.read(tmp_path)
  folder = datasets.prepare("odd", "file", tmp_path)
  with pytest.raises(ValueError, match="prepared from odd, not from other"):
    datasets.read(folder, "other")
  with pytest.raises(ValueError, match="nothing can be written below"):
    datasets.prepare("odd", "file", folder / "dataset_info.json")
  records = next(folder.glob("*array_record*"))
  records.write_bytes(records.read_bytes()[:100])
  with pytest.raises(ValueError, match="prepare"):
    tuple(datasets.read(folder))
  (folder / "dataset_info.json").write_text("{", encoding="utf-8")
  with pytest.raises(ValueError, match="holds no conversations"):
    datasets.read(folder)


@pytest.mark.parametrize(
  ("name", "file"),
  [
    ("longmemeval", "longmemeval/longmemeval_oracle.sample.json"),
    ("locomo", "locomo/locomo8.dev.json"),
    ("perltqa", "perltqa/perltmem_en_v2.sample.json"),
  ],
)
def test_real_benchmarks_come_back_whole_and_without_tensorflow(shared_data, tmp_path, name, file):
  command = [sys.executable, "-m", "attrimem_jax.data.datasets", name, str(shared_data / file), str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  folder = done.stdout.splitlines()[-1]
  loaded, report = benchmarks.load(name, folder)
  episodes, _ = benchmarks.load(name, shared_data / file)
  assert tuple(loaded) == tuple(episodes)
  assert f"{len(episodes)} conversations" in report
  assert json.loads((tmp_path / "conversations" / name / "1.0.0" / "dataset_info.json").read_text())["name"]
  assert "tensorflow" not in sys.modules
