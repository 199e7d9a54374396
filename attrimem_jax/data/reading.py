"""What the readers of benchmark files share: finding and loading a file, typed fields, the log of irregularities.

Every error names the file and the field in it. A file of gigabytes is read item by item (`Format.items`).
"""

import collections
import contextlib
import dataclasses
import enum
import json
import lzma
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from attrimem_jax import checks
from attrimem_jax.types import Episode

ENVIRONMENT = "ATTRIMEM_DATA"
LARGEST = 1 << 26  # characters of one item of a list; the longest haystacks published have some 7 million

Log = dict[Any, list[str]]  # by change, which is a StrEnum of the reader

_CHUNK = 1 << 20
_SPACE = " \t\r\n\ufeff"
_ZERO_WIDTH = re.compile("[\u200b\u2060\ufeff]")  # not the joiner U+200D, which holds emoji together
_WORDS = {list: "a list", dict: "an object", str: "text", int: "a whole number", bool: "true or false"}


@dataclasses.dataclass(frozen=True)
class Report:
  """What a file holds, and every irregularity in it with the ids of the places.

  `questions` counts by kind; `labels` shows a kind in other words; `images` counts turns whose text carries a caption.
  """

  file: str
  conversations: int
  sessions: int
  turns: int
  questions: Mapping[str, int]
  changes: Mapping[Any, tuple[str, ...]]
  images: int = 0
  labels: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def text(self) -> str:
    """The report for people."""
    kinds = ", ".join(
      f"{self.labels.get(kind, kind)} {self.questions.get(kind, 0)}" for kind in self.labels or sorted(self.questions)
    )
    captions = f" ({self.images} with an image caption)" if self.images else ""
    head = f"{self.file}: {self.conversations} conversations, {self.sessions} sessions, {self.turns} turns{captions}"
    lines = [f"{head}, {sum(self.questions.values())} questions ({kinds})"]
    for change, places in self.changes.items():
      more = f" and {len(places) - 5} more" if len(places) > 5 else ""
      lines.append(f"  {len(places):4d}  {change}: {', '.join(places[:5])}{more}")
    return "\n".join(lines)


def report(file: str, episodes: Sequence[Episode], changes: type[enum.StrEnum], log: Log, **more: Any) -> Report:
  """Counts what was read and orders the log as its enumeration is."""
  sessions = [session for episode in episodes for session in episode.history.sessions]
  kinds = collections.Counter(question.kind for episode in episodes for question in episode.questions)
  return Report(
    file=file,
    conversations=len(episodes),
    sessions=len(sessions),
    turns=sum(len(session.turns) for session in sessions),
    questions=dict(kinds),
    changes={change: tuple(log[change]) for change in changes if change in log},
    **more,
  )


def note(log: Log, change: enum.StrEnum, place: str) -> None:
  """Adds a place to the log of irregularities."""
  log.setdefault(change, []).append(place)


def without_zero_width(text: str) -> str:
  """The text without characters that nobody sees, which would make two equal answers differ."""
  return _ZERO_WIDTH.sub("", text)


@dataclasses.dataclass(frozen=True)
class Format:
  """A benchmark's file format, by the name it has in messages. All methods raise ValueErrors that say where."""

  name: str

  def error(self, where: str, what: str) -> ValueError:
    advice = "Compare with the one that third_party/datasets.toml names."
    return ValueError(f"{where}: not a {self.name} file: {what}. {advice}")

  def typed(self, value: Any, kind: type, where: str) -> Any:
    """`value`, where it is of JSON type `kind`; a text holds Unicode characters alone."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
      raise self.error(where, f"expected {_WORDS[kind]}, got {type(value).__name__}")
    if kind is str:
      try:
        checks.text("the text", value)
      except ValueError as error:
        raise self.error(where, str(error)) from None
    return value

  def field(self, item: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """The field of an object, which must be there and of the type."""
    if name not in item:
      raise self.error(where, f"field {name!r} is missing among {', '.join(map(repr, list(item)[:8])) or 'no fields'}")
    return self.typed(item[name], kind, f"{where}.{name}")

  def number(self, value: int | float, where: str) -> str:
    """A number as text; json reads NaN, Infinity and 1e999 too, which are none."""
    if not abs(value) < 1e300:
      raise self.error(where, f"the number {checks.shown(value)} is no answer")
    return str(value)

  def unique(self, ids: Sequence[str], field: str, file: str) -> None:
    repeated = [name for name, count in collections.Counter(ids).items() if count > 1]
    if repeated:
      raise self.error(file, f"{field} {repeated[0]!r} stands twice")

  def resolve(self, path: str | pathlib.Path = "") -> pathlib.Path:
    """The file meant by `path`, or by ATTRIMEM_DATA where `path` is empty."""
    if not isinstance(path, str | pathlib.Path):
      raise ValueError(f"The {self.name} file is {checks.shown(path)}: give a path.")
    chosen = os.fspath(path) or os.environ.get(ENVIRONMENT, "")
    if not chosen:
      raise ValueError(
        f"{self.name} needs a file: set config.data.path or {ENVIRONMENT} (third_party/datasets.toml says whence)."
      )
    file = pathlib.Path(os.path.expanduser(chosen))
    if not file.is_file():
      raise ValueError(f"There is no file at {chosen!r}: correct config.data.path or {ENVIRONMENT}.")
    return file

  def load(self, file: pathlib.Path) -> Any:
    """The whole of a JSON file."""
    with self._readable(str(file)):
      return json.loads(file.read_bytes(), object_pairs_hook=_object)

  def items(self, file: pathlib.Path) -> Iterator[Any]:
    """The items of a JSON list, or of JSON lines, one after the other; a name that ends in .xz is unpacked on the way.

    Never more than the item at hand and a chunk of the file is held. An item of more than `LARGEST` characters is
    refused.
    """
    packed = file.suffix == ".xz"
    with self._readable(str(file)), lzma.open(file, "rt", encoding="utf-8") if packed else _text(file) as stream:
      yield from self._items(stream, str(file))

  def _items(self, stream: TextIO, file: str) -> Iterator[Any]:
    text = _filled("", stream)
    listed = text.startswith("[")
    text = text[1:] if listed else text
    index = 0
    while text := _filled(text, stream):
      if listed and text[0] == "]":
        if _filled(text[1:], stream):
          raise self.error(file, f"text follows the list of {index} items")
        return
      if listed and index:
        if text[0] != ",":
          raise self.error(f"{file}[{index}]", f"broken JSON: {checks.shown(text[:12])} where a comma should be")
        text = _filled(text[1:], stream)
      item, text = self._item(text, stream, f"{file}[{index}]")
      yield item
      index += 1
    if listed:
      raise self.error(f"{file}[{index}]", "broken or cut JSON: the list is never closed")

  def _item(self, text: str, stream: TextIO, where: str) -> tuple[Any, str]:
    """The item that `text` starts with and what follows it; reads on where the text may have been cut."""
    while True:
      try:
        item, end = _DECODER.raw_decode(text)
        return item, text[end:]
      except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated") or error.pos >= len(text) - 16
        if cut and len(text) > LARGEST:
          raise self.error(where, f"an item of more than {LARGEST} characters ({error.msg})") from None
        more = stream.read(max(_CHUNK, len(text))) if cut else ""
        if not more:
          what = f"broken or cut JSON at character {error.pos} of the item ({error.msg})"
          raise self.error(where, what) from error
        text += more
      except RecursionError:
        raise self.error(where, "lists or objects nested too deeply") from None
      except ValueError as error:
        raise self.error(where, str(error)) from None

  @contextlib.contextmanager
  def _readable(self, file: str) -> Iterator[None]:
    """Turns what loading may raise into an error that names the file."""
    try:
      yield
    except OSError as error:
      raise ValueError(
        f"{file} cannot be read ({error.strerror or error}): correct config.data.path or the file's rights."
      ) from None
    except UnicodeDecodeError as error:
      raise self.error(file, f"not a text file ({error.reason} at byte {error.start}); unpack it first") from error
    except (lzma.LZMAError, EOFError) as error:
      raise self.error(file, f"not a whole .xz file ({error})") from None
    except json.JSONDecodeError as error:
      what = f"broken or cut JSON at line {error.lineno}, column {error.colno} ({error.msg})"
      raise self.error(file, what) from error
    except RecursionError:
      raise self.error(file, "lists or objects nested too deeply") from None
    except ValueError as error:  # a key that stands twice, a number of thousands of digits
      if str(error).startswith(file):
        raise
      raise self.error(file, str(error)) from None


def _text(file: pathlib.Path) -> TextIO:
  return file.open(encoding="utf-8", newline="")


def _filled(text: str, stream: TextIO) -> str:
  """`text` without leading blanks, read on until something is there; "" at the end of the file."""
  while not (text := text.lstrip(_SPACE)):
    text = stream.read(_CHUNK)
    if not text:
      return ""
  return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """A JSON object; of two equal keys json would keep the later one without a word."""
  item = dict(pairs)
  if len(item) < len(pairs):
    key, _ = collections.Counter(key for key, _ in pairs).most_common(1)[0]
    raise ValueError(f"key {key!r} stands twice in one object")
  return item


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
