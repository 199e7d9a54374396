"""Dates as data sets write them, as ISO-8601 local time without zone. No clock is read: unknown stays unknown."""

import datetime
import re
from typing import Any

from attrimem_jax import checks

_NAMES = "jan feb mar apr may jun jul aug sep oct nov dec"
_MONTHS = {name: number for number, name in enumerate(_NAMES.split(), 1)}
_TIME_ON_DAY = re.compile(
  r"(?P<hour>\d{1,2}):(?P<minute>\d{2})\s*(?P<half>am|pm)\s+on\s+(?P<day>\d{1,2})\s+(?P<month>[a-z]+),?\s+(?P<year>\d{4})",
  re.IGNORECASE,
)

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_WEEKDAY = re.compile(r"(\d{4})/(\d{2})/(\d{2}) \((\w{3})\) (\d{2}):(\d{2})", re.ASCII)


def parse_weekday(text: str) -> str:
  """Turns LongMemEval's "2023/05/20 (Sat) 02:21" into "2023-05-20T02:21".

  Raises:
    ValueError: the text is not of that form, no such day or time exists, or it is another day of the week.
  """
  match = _WEEKDAY.fullmatch(text.strip())
  if match is None:
    raise ValueError(f"{checks.shown(text)} is not a date like '2023/05/20 (Sat) 02:21'")
  name = match[4]
  try:
    date = datetime.datetime(int(match[1]), int(match[2]), int(match[3]), int(match[5]), int(match[6]))
  except ValueError as error:
    raise ValueError(f"{text!r} is not a date: {error}") from error
  if name != _DAYS[date.weekday()]:
    raise ValueError(f"{text!r} is not a date: that day is a {_DAYS[date.weekday()]}")
  return date.isoformat(timespec="minutes")


_DAY = re.compile(r"(?P<month>[a-z]+)\.?\s+(?P<day>\d{1,2}),?\s+(?P<year>\d{4})", re.IGNORECASE | re.ASCII)


def loose(text: str) -> str:
  """A date in one of PerLTQA's forms, "May 12, 2022" or "2022-05-12 10:00", as ISO-8601; "" for any other words."""
  match = _DAY.fullmatch(text.strip())
  try:
    if match is None:
      return iso("", text.strip())
    month = _MONTHS[match["month"][:3].lower()]
    return datetime.date(int(match["year"]), month, int(match["day"])).isoformat()
  except (KeyError, ValueError):
    return ""


def parse(text: str) -> str:
  """Turns LoCoMo's "1:56 pm on 8 May, 2023" into "2023-05-08T13:56", whatever the language of the machine.

  Raises:
    ValueError: the text is not of that form, or no such day or time exists.
  """
  match = _TIME_ON_DAY.fullmatch(text.strip())
  month = _MONTHS.get(match["month"][:3].lower()) if match else None
  if match is None or month is None or not 1 <= int(match["hour"]) <= 12:
    raise ValueError(f"{text!r} is not a date like '1:56 pm on 8 May, 2023'")
  hour = int(match["hour"]) % 12 + (12 if match["half"].lower() == "pm" else 0)  # 12 am is 0, 12 pm is 12
  try:
    date = datetime.datetime(int(match["year"]), month, int(match["day"]), hour, int(match["minute"]))
  except ValueError as error:
    raise ValueError(f"{text!r} is not a date: {error}") from error
  return date.isoformat(timespec="minutes")


def iso(owner: str, value: Any) -> str:
  """A date as `Session` and `Question` hold it: "2024-03-04", or with a local time "2024-03-04T18:30"; "" is unknown.

  Args:
    owner: of the date, for messages.
    value: ISO-8601 text, or a `datetime.date` or `datetime.datetime`; seconds and a time zone are left out.

  Raises:
    ValueError: it is none of these, or there is no such day or time.
  """
  if isinstance(value, datetime.datetime):
    return value.replace(tzinfo=None).isoformat(timespec="minutes")
  if isinstance(value, datetime.date):
    return value.isoformat()
  if isinstance(value, str) and not value:
    return ""
  for kind in (datetime.date, datetime.datetime):
    try:
      return iso(owner, kind.fromisoformat(value))
    except (TypeError, ValueError):
      pass
  raise ValueError(f"{owner} has the date {checks.shown(value)}: write 2024-03-04 or 2024-03-04T18:30, or give ''")
