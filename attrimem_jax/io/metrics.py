"""What a run leaves for its reader: metrics as JSON lines and TensorBoard events, rollouts per step, a progress line.

A run that goes on from a checkpoint first drops all that was written after it, so no step stands in a log twice.
"""

import collections
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
import tensorboardX

_ROLLOUTS = re.compile(r"step_(\d+)\.jsonl")
# JSON allows these raw within a string, yet `str.splitlines` takes them for the end of a line.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


class MetricsWriter:
  """Appends metrics to <workdir>/metrics.jsonl and to event files below <workdir>/tensorboard.

  Args:
    workdir: folder of the run; made where missing.
    resume_step: the step that the run goes on from; rows, rollouts, evaluations and memories of later
      steps are removed. None
      starts afresh and removes those of all steps.

  Raises:
    ValueError: the existing file holds a line, before its last one, that is not a row of metrics.
  """

  def __init__(self, workdir: str | os.PathLike[str], resume_step: int | None):
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    last = -1 if resume_step is None else resume_step
    self.path = folder / "metrics.jsonl"
    _drop_rows(self.path, last)
    for kind in ("rollouts", "evaluations", "memories"):
      drop_rollouts(folder, last, kind)
    self._file = self.path.open("a", encoding="utf-8")
    # Event files only grow; `purge_step` tells TensorBoard to forget what they hold from that step on.
    self._events = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1)

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes one row: `step`, then the metrics in the order given. A value that is not finite is null, and no event.

    Args:
      step: number of updates done.
      metrics: numbers (or arrays of one number) by slash-separated name ("train/loss").

    Raises:
      ValueError: a metric is called "step".
    """
    if "step" in metrics:
      raise ValueError(f'{self.path}: a metric is called "step", the name of the row\'s own number; rename it')
    row = {name: _finite(float(value)) for name, value in metrics.items()}
    self._file.write(_line({"step": int(step), **row}))
    self._file.flush()
    for name, value in row.items():
      if value is not None:
        self._events.add_scalar(name, value, int(step))

  def close(self) -> None:
    """Writes what is still buffered."""
    self._file.close()
    self._events.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def _drop_rows(path: pathlib.Path, last: int) -> None:
  if not path.exists():
    return
  lines = path.read_bytes().splitlines()
  kept = []
  for number, line in enumerate(lines, 1):
    try:
      step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError) as error:
      if number == len(lines):  # the run was killed while it wrote this line
        continue
      message = (
        f"{path}:{number}: {line[:80]!r} is not a row of metrics; mend or remove the line, or use another workdir"
      )
      raise ValueError(message) from error
    if step <= last:
      kept.append(line + b"\n")
  _replace(path, b"".join(kept))


def read_rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of a JSON-lines file; lines that are none (of a run that was killed while it wrote) are left out."""
  if not path.is_file():
    return []
  rows = []
  for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
    try:
      row = json.loads(line)
    except ValueError:
      continue
    if isinstance(row, dict):
      rows.append(row)
  return rows


def write_rollouts(
  workdir: str | os.PathLike[str], step: int, rows: Iterable[Mapping[str, Any]], folder: str = "rollouts"
) -> pathlib.Path:
  """Writes <workdir>/<folder>/step_XXXXXX.jsonl, whole or not at all; one JSON object a line. Returns its path.

  NumPy numbers and arrays become numbers and lists; a number that is not finite becomes null.
  """
  path = pathlib.Path(workdir) / folder / f"step_{step:06d}.jsonl"
  write_lines(path, rows)
  return path


def write_lines(path: pathlib.Path, rows: Iterable[Mapping[str, Any]]) -> None:
  """Writes one JSON object a line, the whole file or nothing."""
  path.parent.mkdir(parents=True, exist_ok=True)
  # A lone surrogate has no UTF-8 form; its backslash escape is the very one that JSON uses.
  _replace(path, "".join(map(_line, rows)).encode("utf-8", "backslashreplace"))


def write_json(path: pathlib.Path, content: Any, indent: int | None = 1) -> None:
  """Writes a file, whole or not at all; NumPy values and numbers that are not finite as `write_rollouts` does."""
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps(_plain(content), ensure_ascii=False, allow_nan=False, indent=indent)
  _replace(path, (text + "\n").encode("utf-8", "backslashreplace"))


def drop_rollouts(workdir: str | os.PathLike[str], last: int, folder: str = "rollouts") -> None:
  """Removes the files of steps after `last`; other files stay."""
  for path in (pathlib.Path(workdir) / folder).glob("step_*.jsonl"):
    match = _ROLLOUTS.fullmatch(path.name)
    if match and int(match[1]) > last:
      path.unlink()


def _line(row: Mapping[str, Any]) -> str:
  return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS) + "\n"


def _plain(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, np.generic | np.ndarray):
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  return _finite(value) if isinstance(value, float) else value


def _finite(value: float) -> float | None:
  return value if math.isfinite(value) else None


def _replace(path: pathlib.Path, content: bytes) -> None:
  # A rename is atomic, but only of a file whose content has reached the disk.
  temporary = path.with_name(path.name + ".tmp")
  with temporary.open("wb") as file:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(path)


class Progress:
  """One line on standard error: step, values, rate and time left.

  On a terminal the line is written over; elsewhere (a log file) each call gives a line of its own.

  Args:
    start: the step that this process begins at; what an earlier one did is not part of the rate.
    total: the step at which the run ends.
    unit: what is counted, in the singular.
    stream: where to write; standard error by default.
  """

  _WINDOW = 20  # calls over which the rate is taken, so that the first step's compilation is soon forgotten

  def __init__(self, start: int, total: int, unit: str = "step", stream: TextIO | None = None):
    self.total, self._unit = total, unit
    self._stream = stream or sys.stderr
    self._seen: collections.deque[tuple[int, float]] = collections.deque([(start, time.monotonic())], self._WINDOW)
    self._width = 0

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    if self._width:  # leave the last line standing
      print(file=self._stream, flush=True)

  def show(self, step: int, values: Mapping[str, Any]) -> None:
    """Shows where the run is.

    Args:
      step: number of updates done.
      values: numbers to show, by name.
    """
    self._seen.append((step, time.monotonic()))
    numbers = "  ".join(f"{name} {float(value):.4g}" for name, value in values.items())
    line = "  ".join(part for part in (f"{step}/{self.total}", numbers, self._pace(step)) if part)
    if self._stream.isatty():
      line = line[: shutil.get_terminal_size().columns - 1]
      print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
      self._width = len(line)
    else:
      print(line, file=self._stream, flush=True)

  def _pace(self, step: int) -> str:
    (first, began), (last, now) = self._seen[0], self._seen[-1]
    if last <= first or now <= began:
      return ""
    rate = (last - first) / (now - began)
    pace = f"{rate:.1f} {self._unit}s/s" if rate >= 1 else f"{1 / rate:.1f} s/{self._unit}"
    return f"{pace}  {_clock(max(self.total - step, 0) / rate)} left"


def _clock(seconds: float) -> str:
  minutes, second = divmod(round(seconds), 60)
  hour, minute = divmod(minutes, 60)
  return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
