"""How long the phases of a step take."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
  """Seconds of each phase as metrics `time/<phase>`:  `with clock("write"): …`, then `clock.times`.

  A phase that comes twice counts all of its time.
  """

  def __init__(self) -> None:
    self.times: dict[str, float] = {}

  @contextlib.contextmanager
  def __call__(self, phase: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    self.times[f"time/{phase}"] = self.times.get(f"time/{phase}", 0.0) + time.monotonic() - start


def unix_time() -> int:
  """Seconds since 1970, for what leaves this program with a date; nothing is computed from it."""
  return int(time.time())
