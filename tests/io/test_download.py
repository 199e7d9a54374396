"""Fetching a benchmark: from addresses of files, so without a network."""

import hashlib
import pathlib

import pytest

from attrimem_jax.io.download import fetch, manifest

CONTENT = b"[{}]" * 1000


@pytest.fixture
def table(tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  (source / "one file.json").write_bytes(CONTENT)
  (source / "b.json").write_bytes(b"{}")
  entry = {"url": source.as_uri() + "/", "source": "https://example.org/data", "licence": "MIT"}
  digest = hashlib.sha256(CONTENT).hexdigest()
  return {
    "whole": entry | {"files": ["one file.json"], "sha256": digest, "bytes": len(CONTENT)},
    "two": entry | {"files": ["one file.json", "b.json"], "sha256": "", "bytes": 0},
  }


def test_files_are_fetched_once_and_again_where_they_are_damaged(table, tmp_path):
  (path,) = fetch("whole", tmp_path / "data", table)
  assert path == tmp_path / "data" / "whole" / "one file.json"
  assert path.read_bytes() == CONTENT
  first = path.stat().st_mtime_ns
  fetch("whole", tmp_path / "data", table)
  assert path.stat().st_mtime_ns == first
  path.write_bytes(CONTENT[:-1])
  fetch("whole", tmp_path / "data", table)
  assert path.read_bytes() == CONTENT
  assert [p.name for p in fetch("two", tmp_path / "data", table)] == ["one file.json", "b.json"]
  assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"sha256": "0" * 64}, "it is another version; get it from https://example.org/data and put it at"),
    ({"bytes": 7}, "4,000 bytes and not 7"),
    ({"files": ["none.json"]}, "cannot be fetched"),
    ({"url": "http://127.0.0.1:9/"}, "cannot be fetched"),  # nobody listens there
  ],
)
def test_what_is_not_as_the_table_says_is_never_left_behind(table, tmp_path, change, words):
  with pytest.raises(ValueError, match=words):
    fetch("whole", tmp_path / "data", {"whole": table["whole"] | change})
  assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []


def test_a_folder_that_cannot_be_made_is_named(table, tmp_path):
  (tmp_path / "data").write_text("a file", encoding="utf-8")
  with pytest.raises(ValueError, match="data/whole cannot be made"):
    fetch("whole", tmp_path / "data", table)


def test_unknown_names_are_refused_with_the_known_ones(table, tmp_path):
  with pytest.raises(ValueError, match="no benchmark 'locomoo': use whole, two"):
    fetch("locomoo", tmp_path, table)


def test_every_entry_of_the_manifest_makes_an_address():
  for name, entry in manifest().items():
    assert entry["url"].startswith("https://"), name
    assert entry["url"].endswith("/"), name
    assert all(pathlib.PurePosixPath(file).suffix == ".json" for file in entry["files"]), name
