"""Fetches a benchmark that third_party/datasets.toml lists, and checks size and SHA-256 where it states them.

  python -m attrimem_jax.io.download longmemeval_oracle data

None of them is part of this package, and each has a licence of its own, which is shown.
"""

import hashlib
import os
import pathlib
import sys
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from attrimem_jax.io.metrics import Progress

_PACKAGE = pathlib.Path(__file__).parents[1]
MANIFESTS = tuple(folder / "third_party" / "datasets.toml" for folder in (_PACKAGE, _PACKAGE.parent))
_CHUNK = 1 << 23


def manifest() -> dict[str, dict[str, Any]]:
  """The table of benchmarks by name, of the installed package or of a checkout."""
  return tomllib.loads(next(path for path in MANIFESTS if path.is_file()).read_text(encoding="utf-8"))


def fetch(name: str, folder: str | os.PathLike[str], table: Mapping[str, Mapping[str, Any]]) -> list[pathlib.Path]:
  """Downloads the files of a benchmark into a folder, those that are there and right not again; returns their paths.

  A file appears under its name only when it is whole and what the table says; a part of it never does.

  Raises:
    ValueError: no such benchmark; or the network, size or checksum is wrong. Says how to go on by hand.
  """
  if name not in table:
    raise ValueError(f"there is no benchmark {name!r}: use {', '.join(table)}")
  entry = table[name]
  base, files = entry["url"], entry["files"]
  whole = entry if len(files) == 1 else {"sha256": "", "bytes": 0}
  found = []
  for file in files:
    target = pathlib.Path(folder).expanduser() / name / file
    if not (target.is_file() and not _wrong(target, whole)):
      _download(base + urllib.parse.quote(file), target, whole, entry["source"])
    found.append(target)
  return found


def _download(url: str, target: pathlib.Path, entry: Mapping[str, Any], source: str) -> None:
  by_hand = f"get it from {source} and put it at {target}"
  part = target.with_name(target.name + ".part")
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"the folder {target.parent} cannot be made ({error}): give another") from None
  try:
    with urllib.request.urlopen(url, timeout=60) as reply, part.open("wb") as out:
      total = -(-int(reply.headers.get("Content-Length") or 0) // _CHUNK)
      with Progress(0, total, "chunk of 8 MiB") as progress:
        while chunk := reply.read(_CHUNK):
          out.write(chunk)
          progress.show(-(-out.tell() // _CHUNK), {})
  except (OSError, urllib.error.URLError) as error:
    part.unlink(missing_ok=True)
    raise ValueError(f"{url} cannot be fetched ({error}): {by_hand}") from None
  if wrong := _wrong(part, entry):
    part.unlink()
    raise ValueError(f"what {url} sends has {wrong}: it is another version; {by_hand}, or correct the table")
  part.replace(target)


def _wrong(path: pathlib.Path, entry: Mapping[str, Any]) -> str:
  """What of a file is not as the table says; "" where all is."""
  if entry["bytes"] and path.stat().st_size != entry["bytes"]:
    return f"{path.stat().st_size:,} bytes and not {entry['bytes']:,}"
  if entry["sha256"]:
    with path.open("rb") as stream:
      digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry["sha256"]:
      return f"SHA-256 {digest} and not {entry['sha256']}"
  return ""


if __name__ == "__main__":
  try:
    known = manifest()
    if len(sys.argv) != 3:
      sys.exit(f"usage: python -m attrimem_jax.io.download {{{','.join(known)}}} FOLDER")
    paths = fetch(sys.argv[1], sys.argv[2], known)
  except ValueError as error:
    sys.exit(f"error: {error}")
  print(f"{known[sys.argv[1]]['licence']}: {known[sys.argv[1]]['source']}")
  print("\n".join(f"--config.data.path={path}" for path in paths))
