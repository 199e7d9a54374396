"""The page of a study: a table of arms, paired differences with intervals, and learning curves with bands."""

import pathlib
from collections.abc import Mapping
from typing import Any

from attrimem_jax.view import html
from attrimem_jax.view.charts import Series, interval_chart, line_chart
from attrimem_jax.view.report import smooth

_LABELS = {
  "memory_tokens": "tokens of memory",
  "fact_recall": "facts recalled",
  "fact_precision": "tokens that state a fact",
  "needed_tokens": "tokens that a question needs",
  "rejected": "actions refused",
  "flat_groups": "flat groups",
  "steps_to_outcome": "steps to outcome's end",
  "seconds": "seconds of training",
}


def write_page(path: pathlib.Path, summary: Mapping[str, Any]) -> None:
  """Writes the page of what `jobs.study.summarise` returned."""
  title = "Study: " + ", ".join(summary["arms"])
  parts = [f"<h1>{html.escape(title)}</h1>", _note(summary), "<h2>Arms</h2>", _arms(summary), "<h2>Differences</h2>"]
  differences = summary["differences"]
  rows = [(name, d["mean"], d["low"], d["high"]) for name, d in differences.items()]
  parts += [
    f"<figure>{interval_chart('Difference in held-out accuracy, paired by seed and conversation', rows)}</figure>"
  ]
  rows = [(name, d["mean"], d["low"], d["high"]) for name, d in summary["over_training"].items()]
  parts += [f"<figure>{interval_chart('The same, of the mean over all evaluations after the start', rows)}</figure>"]
  parts += [_between_runs(summary)]
  if summary["kinds"]:
    parts += ["<h2>Kinds of questions</h2>", _kinds(summary)]
  parts += ["<h2>Curves</h2>"]
  for key, label in (("accuracy", "Held-out accuracy"), ("reward", "Reward in training")):
    for name, curves in summary["curves"].items():
      if len(curves[key]) > 1:
        x, mean, low, high = (list(column) for column in zip(*curves[key], strict=True))
        band = [Series("mean of the seeds", x, mean, line=True), Series("lowest and highest", x, mean, low, high)]
        parts.append(f"<figure>{line_chart(f'{label}: {name}', band)}</figure>")
  path.write_text(html.document(title, "\n".join(p for p in parts if p)), encoding="utf-8")


def write_pictures(folder: pathlib.Path, summary: Mapping[str, Any]) -> list[pathlib.Path]:
  """Writes curves.png and differences.png, and returns their paths; none without matplotlib (the extra `plots`).

  Arms differ by mark and dash, so that colour is never needed.
  """
  try:
    from matplotlib.figure import Figure
  except ModuleNotFoundError:
    return []
  written = []
  figure = Figure(figsize=(11, 4.2), layout="constrained")
  for axes, key, label in zip(
    figure.subplots(1, 2),
    ("accuracy", "reward"),
    ("held-out accuracy", "training reward, mean of 5 steps"),
    strict=True,
  ):
    for number, (name, curves) in enumerate((n, c) for n, c in summary["curves"].items() if len(c[key]) > 1):
      x, mean, low, high = (list(column) for column in zip(*curves[key], strict=True))
      if key == "reward":  # every step asks about other histories, which moves it more than learning does
        mean, low, high = (smooth(values, 5) for values in (mean, low, high))
      dash, mark = _DASHES[number % len(_DASHES)], _MARKS[number % len(_MARKS)]
      (line,) = axes.plot(x, mean, linestyle=dash, marker=mark, markevery=max(1, len(x) // 8), label=name)
      axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel=label, title="mean, and lowest to highest of the seeds")
    if axes.lines:
      axes.legend()
  written.append(folder / "curves.png")
  figure.savefig(written[-1], dpi=130)
  rows = list(summary["differences"].items())
  if rows:
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, (_, found) in enumerate(rows):
      sure = not found["low"] <= 0 <= found["high"]
      axes.plot([found["low"], found["high"]], [place, place], color="black")
      axes.plot(found["mean"], place, "o", color="black", markerfacecolor="black" if sure else "white")
      axes.plot(found["by_seed"], [place + 0.25] * len(found["by_seed"]), "|", color="black", markersize=5)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set(xlabel="difference in held-out accuracy, 95 % (full mark: 0 is outside; strokes: seeds)")
    written.append(folder / "differences.png")
    figure.savefig(written[-1], dpi=130)
  return written


_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKS = ("o", "s", "^", "D", "v", "x", "P")


def _kinds(summary: Mapping[str, Any]) -> str:
  """Accuracy of each arm by kind of question, then each difference."""
  kinds = summary["kinds"]
  parts = []
  for part, sign in (("arms", ""), ("differences", "+")):
    names = list(dict.fromkeys(name for of in kinds.values() for name in of[part]))
    cells = [
      [html.escape(name), *(_interval(of[part][name], sign) if name in of[part] else "" for of in kinds.values())]
      for name in names
    ]
    parts.append(html.table(["", *kinds], cells))
  return "\n".join(parts)


def _between_runs(summary: Mapping[str, Any]) -> str:
  """Differences run by run, with the interval that only the spread between runs gives."""
  rows = [
    [
      html.escape(name),
      _interval(found, "+"),
      "" if found["t_low"] is None else f"[{found['t_low']:+.3f}, {found['t_high']:+.3f}]",
      " ".join(f"{value:+.3f}" for value in found["by_seed"]),
    ]
    for name, found in summary["differences"].items()
  ]
  return html.table(["difference", "over runs and conversations", "between runs (Student)", "each seed"], rows)


def _interval(found: Mapping[str, float], sign: str = "") -> str:
  return f"{found['mean']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


def _note(summary: Mapping[str, Any]) -> str:
  return (
    '<p class="note">95 % intervals, from resampling runs and conversations apart. With few runs they are somewhat too '
    "narrow. A difference whose interval holds 0 is none that this study can tell.</p>"
  )


def _arms(summary: Mapping[str, Any]) -> str:
  rows = []
  for name, arm in summary["arms"].items():
    shown = _interval(arm["accuracy"])
    rest = ["" if arm[key] is None else f"{arm[key]:.3g}" for key in _LABELS]
    rows.append([html.escape(name), str(len(arm["seeds"])), shown, *rest])
  return html.table(["arm", "seeds", "held-out accuracy", *_LABELS.values()], rows)
