"""Line charts as SVG: black marks and lines that differ by shape, so that colour is never needed to read them."""

import dataclasses
import math
from collections.abc import Sequence

from attrimem_jax.view.html import escape

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 30, 40


@dataclasses.dataclass(frozen=True)
class Series:
  """Points of one measurement.

  Attributes:
    label: what they are; "" leaves them out of the key.
    x, y: of the points, in order of x.
    low, high: ends of each point's interval, or empty.
    line: a line through the points, or a mark at each of them.
  """

  label: str
  x: Sequence[float]
  y: Sequence[float]
  low: Sequence[float] = ()
  high: Sequence[float] = ()
  line: bool = False


@dataclasses.dataclass(frozen=True)
class _Frame:
  """Maps data to the picture."""

  x: tuple[float, float]
  y: tuple[float, float]

  def across(self, value: float) -> float:
    return _LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (_WIDTH - _LEFT - _RIGHT)

  def down(self, value: float) -> float:
    return _HEIGHT - _BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(title: str, series: Sequence[Series], x_label: str = "step") -> str:
  """An SVG element; "" where no series has a point."""
  xs = [x for s in series for x in s.x]
  if not xs:
    return ""
  ys = [y for s in series for y in (*s.y, *s.low, *s.high)]
  x_ticks, y_ticks = ticks(min(xs), max(xs), least=1.0), ticks(min(ys), max(ys))
  frame = _Frame(_span(xs), (y_ticks[0], y_ticks[-1]))
  drawn = "".join(_draw(s, frame) for s in series)
  head = f'<text x="{_LEFT}" y="16" font-weight="600">{escape(title)}</text>' + _key(series, len(title))
  said = f"{title}: " + "; ".join(f"{s.label} from {s.y[0]:.3g} to {s.y[-1]:.3g}" for s in series if s.y and s.label)
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
    f'role="img" aria-label="{escape(said)}" font-family="system-ui,sans-serif" font-size="12" fill="#111">'
    f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
    f"{head}{_axes(frame, x_ticks, y_ticks, x_label)}{drawn}</svg>"
  )


def interval_chart(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
  """An SVG element with a mark and an interval for each row (label, mean, low, high), and a rule at 0; "" for no rows.

  Marks whose interval holds 0 are hollow, the others full.
  """
  if not rows:
    return ""
  left, height = 230, 52 + 22 * len(rows)
  x_ticks = ticks(min(0.0, *(r[2] for r in rows)), max(0.0, *(r[3] for r in rows)))

  def across(value: float) -> float:
    return left + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (_WIDTH - left - 24)

  floor = height - 24
  parts = [f'<text x="8" y="16" font-weight="600">{escape(title)}</text>']
  for value in x_ticks:
    stroke = "#111" if value == 0 else "#e0e0e0"
    parts.append(f'<path d="M{across(value):.1f} 26V{floor}" stroke="{stroke}"/>')
    parts.append(f'<text x="{across(value):.1f}" y="{floor + 16}" text-anchor="middle">{value:g}</text>')
  for number, (label, mean, low, high) in enumerate(rows):
    y = 38 + 22 * number
    fill = "#fff" if low <= 0 <= high else "#111"
    parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
    parts.append(f'<path d="M{across(low):.1f} {y}H{across(high):.1f}" stroke="#111"/>')
    parts.append(f'<circle cx="{across(mean):.1f}" cy="{y}" r="4" fill="{fill}" stroke="#111"/>')
  said = f"{title}: " + "; ".join(f"{label} {mean:+.3f} [{low:+.3f}, {high:+.3f}]" for label, mean, low, high in rows)
  return (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
    f'role="img" aria-label="{escape(said)}" font-family="system-ui,sans-serif" font-size="12" fill="#111">'
    f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>'
  )


def ticks(low: float, high: float, most: int = 6, least: float = 0.0) -> list[float]:
  """Round numbers that reach from `low` or below to `high` or above. ticks(0.12, 0.48) → [0.1, 0.2, 0.3, 0.4, 0.5].

  They are at least `least` apart.
  """
  if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
    low, high = low - 0.5, high + 0.5
  rough = (high - low) / (most - 1)
  power = 10.0 ** math.floor(math.log10(rough))
  step = max(least, next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9)))
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [round(i * step, 12) for i in range(first, last + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
  low, high = min(values), max(values)
  return (low, high) if high > low else (low - 0.5, high + 0.5)


def _axes(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str) -> str:
  lines = []
  for value in y_ticks:
    y = frame.down(value)
    lines.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#e0e0e0"/>')
    lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
  floor = _HEIGHT - _BOTTOM
  for value in x_ticks:
    if frame.x[0] <= value <= frame.x[1]:
      x = frame.across(value)
      lines.append(f'<path d="M{x:.1f} {floor}v4" stroke="#111"/>')
      lines.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{value:g}</text>')
  lines.append(f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - _RIGHT}" fill="none" stroke="#111"/>')
  lines.append(
    f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
  )
  return "".join(lines)


def _draw(series: Series, frame: _Frame) -> str:
  points = [(frame.across(x), frame.down(y)) for x, y in zip(series.x, series.y, strict=True)]
  if series.line and len(points) > 1:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="#111" stroke-width="2"/>'
  ends = [(frame.down(a), frame.down(b)) for a, b in zip(series.low, series.high, strict=True)]
  bars = "".join(
    f'<path d="M{x:.1f} {a:.1f}V{b:.1f}m-4 0h8M{x - 4:.1f} {a:.1f}h8" stroke="#111"/>'
    for (x, _), (a, b) in zip(points, ends, strict=False)  # no ends, no bars
  )
  marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#fff" stroke="#111"/>' for x, y in points)
  return bars + marks


def _key(series: Sequence[Series], after: int) -> str:
  """What each mark means, behind the title."""
  x, parts = _LEFT + 7.5 * after + 24, []
  for s in (s for s in series if s.label):
    mark = (
      f'<path d="M{x} 12h18" stroke="#111" stroke-width="2"/>'
      if s.line and len(s.x) > 1
      else f'<circle cx="{x + 9}" cy="12" r="3.5" fill="#fff" stroke="#111"/>'
    )
    parts.append(f'{mark}<text x="{x + 23}" y="16">{escape(s.label)}</text>')
    x += 40 + 6.6 * len(s.label)
  return "".join(parts)
