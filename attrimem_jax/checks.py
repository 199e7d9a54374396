"""Checks of single values that a caller or a file gives.

Each takes the value's name, with its place, for the message: a ValueError that says what, where, and how to mend it.
"""

import math
import numbers
from collections.abc import Iterable
from typing import Any

_TINY, _HUGE = 1.2e-38, 3.4e38  # what float32 holds; beyond, a number would turn into 0 or infinity
SEEDS = 2**32 - 1  # the largest seed: jax keeps 32 bits of one and would drop the others


def shown(value: Any) -> str:
  """A value as messages show it: on one line, at most 80 characters."""
  try:
    text = repr(value)
  except Exception:  # whole numbers of thousands of digits have no repr; a caller's own class may have a broken one
    text = f"of type {type(value).__name__}"
  return text if len(text) <= 80 else f"{text[:77]}..."


def text(name: str, value: Any, *, empty: bool = True) -> str:
  """A text that can be encoded. With `empty` False, one that holds more than white space."""
  if not isinstance(value, str):
    raise ValueError(f"{name} is {shown(value)}: give a text")
  if not empty and not value.strip():
    raise ValueError(f"{name} is {shown(value)}: give some text")
  try:
    value.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"{name} holds {value[error.start]!r} at character {error.start}, which is no Unicode character: clean it, e.g. "
      'text.encode("utf-8", "replace").decode()'
    ) from None
  return value


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
  """One of a few words."""
  known = [str(word) for word in allowed]
  if not isinstance(value, str) or value not in known:
    raise ValueError(f"{name} is {shown(value)}: use one of {', '.join(known)}")


def whole(name: str, value: Any, least: int, most: int | None = None) -> None:
  """A whole number, `least` <= value <= `most`."""
  whole_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not whole_number or value < least or (most is not None and value > most):
    rule = f"{least} or more" if most is None else f"{least} to {most}"
    raise ValueError(f"{name} is {shown(value)}: use a whole number, {rule}")


def real(name: str, value: Any, low: float, high: float = math.inf, *, closed: bool = False) -> None:
  """A number that float32 can hold, `low` < value < `high`; with `closed`, also `low` itself."""
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  inside = number and low <= value < high and (closed or value != low) and abs(value) <= _HUGE
  if not inside or 0 < abs(value) < _TINY:
    bound = f"{low} {'<=' if closed else '<'} {name.split()[0]}" + (f" < {high}" if high < math.inf else "")
    raise ValueError(f"{name} is {shown(value)}: use a finite number with {bound}")
