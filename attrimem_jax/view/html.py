"""Tokens with weights as HTML that can be read on screen, on paper and without telling colours apart.

A weight speaks twice: by tint (blue for above zero, orange for below, stronger for larger) and by line (solid for
above, dashed for below, thicker for larger). Styles stand on the elements themselves, since notebooks and mail readers
drop style sheets. All text is escaped.
"""

import html
import math
from collections.abc import Iterable, Sequence

from attrimem_jax.text.spans import pieces

BLUE, ORANGE, GREY = (33, 102, 172), (179, 88, 6), "#6b6b6b"

_BOX = (
  "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9;font-family:ui-monospace,Menlo,Consolas,monospace;"
  "font-size:13px;color:#111;background:#fff;padding:6px 10px;border:1px solid #d0d0d0;border-radius:4px;"
  "print-color-adjust:exact;-webkit-print-color-adjust:exact"
)


def escape(text: str) -> str:
  """Text for the inside of an element or of a quoted attribute."""
  return html.escape(text, quote=True)


def largest(weights: Iterable[float | None]) -> float:
  """The largest finite magnitude, which gets the strongest tint; 0.0 if there is none."""
  return max((abs(w) for w in weights if w is not None and math.isfinite(w)), default=0.0)


def tokens(
  parts: Sequence[bytes], weights: Sequence[float | None], *, scale: float | None = None, name: str = "weight"
) -> str:
  """Spans of coloured tokens, with each token's number on hover.

  Args:
    parts: the bytes of each token.
    weights: one per token; None where there is no number: such a token is grey.
    scale: the magnitude that gets the strongest tint; the largest of `weights` if None.
    name: what the numbers are, for the hover text.

  Returns:
    HTML for inside of `box`. Tokens that hold parts of one character share one span, in the colour of their mean.
  """
  assert len(parts) == len(weights), f"{len(parts)} tokens and {len(weights)} weights"
  scale = largest(weights) if scale is None else scale
  return "".join(_span(piece.text, weights[piece.start : piece.stop], scale, name) for piece in pieces(parts))


def box(content: str) -> str:
  """A framed block that keeps white space, for what `tokens` returns."""
  return f'<div style="{_BOX}">{content}</div>'


def legend(scale: float, *, up: str, down: str, none: str) -> str:
  """One line that explains the tints, with the numbers at full strength; grey is left out where `none` is empty."""
  samples = [
    (_swatch(-1.0), f"{escape(down)} (−{scale:.3g})"),
    (_swatch(-0.3), "a little"),
    ('<span style="color:#111">text</span>', "no effect"),
    (_swatch(0.3), "a little"),
    (_swatch(1.0), f"{escape(up)} (+{scale:.3g})"),
  ]
  if none:
    samples.append((f'<span style="color:{GREY}">text</span>', escape(none)))
  if scale == 0.0:
    samples = [("", "Nothing here has a weight.")]
  item = '<span style="margin-right:1.2em;white-space:nowrap">{} {}</span>'
  items = " ".join(item.format(mark, text) for mark, text in samples)  # the spaces are where the line may break
  style = "font:12px/2 system-ui,sans-serif;color:#333;background:#fff;print-color-adjust:exact"
  return f'<div style="{style};-webkit-print-color-adjust:exact">{items}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A plain table; the cells are HTML already."""
  wrap = "max-width:32em;overflow-wrap:break-word"
  cell = f'style="text-align:left;vertical-align:top;padding:3px 12px 3px 0;border-bottom:1px solid #e2e2e2;{wrap}"'
  top = "".join(f"<th {cell}>{escape(name)}</th>" for name in head)
  body = "".join("<tr>" + "".join(f"<td {cell}>{value}</td>" for value in row) + "</tr>" for row in rows)
  style = "border-collapse:collapse;font:13px/1.5 system-ui,sans-serif;color:#111;background:#fff;margin:6px 0"
  return f'<table style="{style}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def card(title: str, content: str) -> str:
  """What a notebook shows for one object: a title line and HTML below it."""
  style = "font:13px/1.5 system-ui,sans-serif;color:#111;background:#fff;padding:8px 12px;max-width:60em"
  return f'<div style="{style}"><div style="font-weight:600;margin-bottom:4px">{escape(title)}</div>{content}</div>'


def said(answer: str, note: str = "") -> str:
  """A line with an answer, and a note behind it in grey."""
  style = "font-size:15px;margin:2px 0 8px;overflow-wrap:anywhere"
  behind = f' <span style="color:#555">{escape(note)}</span>' if note else ""
  return f'<div style="{style}">→ {escape(answer) or "(empty)"}{behind}</div>'


def document(title: str, body: str) -> str:
  """A whole page that needs no other file."""
  style = (
    "body{font:14px/1.55 system-ui,sans-serif;color:#111;background:#fff;max-width:62em;margin:2em auto;padding:0 2em}"
    "h1{font-size:1.5em;margin:0 0 .2em}h2{font-size:1.15em;margin:2em 0 .4em;border-bottom:1px solid #ccc}"
    "h3{font-size:1em;margin:1.4em 0 .3em}.note{color:#555}pre{font-size:12px;white-space:pre-wrap}"
    "svg{max-width:100%;height:auto}figure{margin:0 0 1em}"
    "@media print{body{margin:0;max-width:none}h2,h3{break-after:avoid}figure,tr{break-inside:avoid}}"
  )
  return (
    f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>\n'
    f"<body>\n{body}\n</body></html>\n"
  )


def _span(text: str, weights: Sequence[float | None], scale: float, name: str) -> str:
  shown = escape(text).replace("\n", "↵\n")
  known = [w for w in weights if w is not None and math.isfinite(w)]
  if not known:
    return f'<span style="color:{GREY}">{shown}</span>'
  hover = escape(f"{name} " + ", ".join(f"{w:+.4g}" for w in known))
  strength = sum(known) / len(known) / scale if scale > 0 else 0.0
  return f'<span style="{_paint(strength)}" title="{hover}">{shown}</span>'


def _swatch(strength: float) -> str:
  return f'<span style="{_paint(strength)};padding:1px 3px">text</span>'


def _paint(strength: float) -> str:
  """CSS for a weight as a share of the scale; 0 is plain text, and beyond ±1 nothing gets stronger."""
  size = min(1.0, abs(strength))
  if size == 0.0:
    return "color:#111"
  base, line = (BLUE, "solid") if strength > 0 else (ORANGE, "dashed")
  tint = 0.06 + 0.5 * size  # at most 0.56 of the colour: black text keeps a contrast of 6:1 on it
  mixed = ",".join(str(round(255 + (channel - 255) * tint)) for channel in base)
  width = 1 + round(2 * size)
  return f"color:#111;background:rgb({mixed});border-bottom:{width}px {line} rgb({','.join(map(str, base))})"
