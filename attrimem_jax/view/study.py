"""The page of a study: a table of arms, paired differences with intervals, and learning curves with bands."""

import pathlib
from collections.abc import Mapping
from typing import Any

from attrimem_jax.view import html
from attrimem_jax.view.charts import Series, interval_chart, line_chart

_LABELS = {
  "memory_tokens": "tokens of memory",
  "fact_recall": "facts recalled",
  "fact_precision": "tokens that state a fact",
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
  parts += ["<h2>Curves</h2>"]
  for key, label in (("accuracy", "Held-out accuracy"), ("reward", "Reward in training")):
    for name, curves in summary["curves"].items():
      if len(curves[key]) > 1:
        x, mean, low, high = (list(column) for column in zip(*curves[key], strict=True))
        band = [Series("mean of the seeds", x, mean, line=True), Series("lowest and highest", x, mean, low, high)]
        parts.append(f"<figure>{line_chart(f'{label}: {name}', band)}</figure>")
  path.write_text(html.document(title, "\n".join(p for p in parts if p)), encoding="utf-8")


def _note(summary: Mapping[str, Any]) -> str:
  return (
    '<p class="note">95 % intervals, from resampling runs and conversations apart. With few runs they are somewhat too '
    "narrow. A difference whose interval holds 0 is none that this study can tell.</p>"
  )


def _arms(summary: Mapping[str, Any]) -> str:
  rows = []
  for name, arm in summary["arms"].items():
    accuracy = arm["accuracy"]
    shown = f"{accuracy['mean']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]"
    rest = ["" if arm[key] is None else f"{arm[key]:.3g}" for key in _LABELS]
    rows.append([html.escape(name), str(len(arm["seeds"])), shown, *rest])
  return html.table(["arm", "seeds", "held-out accuracy", *_LABELS.values()], rows)
