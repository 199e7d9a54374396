"""Pages of benchmark runs: one run by itself, and several side by side with costs and paired differences.

python -m attrimem_jax.view.benchmark --out=comparison.html runs/a runs/b …
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attrimem_jax.evaluation.results import paired
from attrimem_jax.view import html

Run = Mapping[str, Any]
_SHOWN = 40  # answers on the page of a run


def write_page(workdir: pathlib.Path) -> pathlib.Path:
  """Writes <workdir>/report.html from its results.json and conversations; returns its path."""
  run = read_results(workdir)
  title = f"{run['system']} on {run['benchmark']}"
  note = f"answer model {run['answer_model']}, {run['conversations']} conversations, {run['questions']} questions"
  body = [
    f"<h1>{html.escape(title)}</h1>",
    _note(note),
    _missing(run),
    _scores(run),
    _judge(run),
    _cost(run),
    _answers(workdir, run),
  ]
  path = workdir / "report.html"
  path.write_text(html.document(title, "\n".join(part for part in body if part)), encoding="utf-8")
  return path


def read_results(workdir: str | pathlib.Path) -> dict[str, Any]:
  """results.json of a run.

  Raises:
    ValueError: there is none, or it cannot be read.
  """
  path = pathlib.Path(workdir) / "results.json"
  try:
    run = json.loads(path.read_bytes())
    return run if run["measures"] and run["system"] else {}
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} holds no results ({error!r}): give the --workdir of a finished benchmark run") from None


def comparison(runs: Sequence[Run], measure: str = "") -> str:
  """A page over runs of one benchmark on the same questions, best first by `measure` (the first they have).

  Raises:
    ValueError: no runs, or runs of several benchmarks.
  """
  names = sorted({run["benchmark"] for run in runs})
  if len(names) != 1:
    raise ValueError(f"the runs are of {', '.join(names) or 'no benchmark'}: compare runs of one benchmark")
  measure = measure or next(iter(runs[0]["measures"]))
  ranked = sorted(runs, key=lambda run: -run["measures"][measure]["overall"][0])
  title = f"Memory systems on {names[0]}"
  body = [f"<h1>{html.escape(title)}</h1>", _note(_where(ranked)), "<h2>Scores</h2>", _table(ranked)]
  body += [_note(_INTERVALS), f"<h2>Accuracy against tokens ({html.escape(measure)})</h2>", _plot(ranked, measure)]
  body += [_note(_PLOT), "<h2>By kind of question</h2>", _kinds(ranked, measure), "<h2>Differences</h2>"]
  body += [_differences(ranked, measure), _note(_PAIRED), "<h2>Cost</h2>", _costs(ranked)]
  return html.document(title, "\n".join(body))


_INTERVALS = (
  "Brackets: 95 % bootstrap over conversations, then over single questions. With few conversations the first is hardly "
  "an interval: with two it can only be the two of them."
)
_PLOT = (
  "Tokens that a question costs, the writing of the memory shared among its conversation's questions, on a logarithmic "
  "scale; bars: bootstrap over questions. Filled marks and the line are the Pareto front: no other run is better and "
  "cheaper. Oracle evidence is a bound and no competitor."
)
_PAIRED = "Row minus column on the same questions; bold where the interval over questions excludes 0."


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
  """Places of the (tokens, score) points that no other beats in both, from cheap to dear; of equal points the first."""
  front: list[int] = []
  for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
    if not front or points[i][1] > points[front[-1]][1]:
      front.append(i)
  return front


def _label(run: Run, runs: Sequence[Run]) -> str:
  models = {r["answer_model"] for r in runs}
  return run["system"] if len(models) == 1 else f"{run['system']}, {run['answer_model']}"


def _where(runs: Sequence[Run]) -> str:
  first = runs[0]
  models = ", ".join(sorted({str(run["answer_model"]) for run in runs}))
  return f"{first['conversations']} conversations, {first['questions']} questions; answer model {models}"


def _table(runs: Sequence[Run]) -> str:
  measures = list(runs[0]["measures"])
  head = ("system", *measures, "without adversarial", "adversarial or to abstain", "tokens a question", "unanswered")
  rows = []
  for run in runs:
    first = run["measures"][measures[0]]
    cells = [_both(run["measures"][m]) for m in measures if m in run["measures"]]
    tokens = f"{run['cost']['tokens_per_question']:,.0f}" if "cost" in run else ""
    parts = [_triple(first["answerable"]), _triple(first["abstention"])]
    rows.append((html.escape(_label(run, runs)), *cells, *parts, tokens, str(len(run["missing"]))))
  return html.table(head, rows)


def _both(row: Mapping[str, Any]) -> str:
  low, high = row["overall_by_question"][1:]
  return f"{_triple(row['overall'])} [{low:.3f}, {high:.3f}]"


_NONE = (None, None, None)  # a kind of question of which none was judged


def _triple(values: Sequence[float | None]) -> str:
  mean, low, high = (math.nan if v is None else v for v in values)
  return "none" if math.isnan(mean) else f"<b>{mean:.3f}</b> [{low:.3f}, {high:.3f}]"


def _kinds(runs: Sequence[Run], measure: str) -> str:
  counts = runs[0]["counts"]
  head = ("system", *(f"{kind} ({count})" for kind, count in counts.items()))
  rows = [
    (html.escape(_label(run, runs)), *(_triple(run["measures"][measure]["kinds"].get(k, _NONE)) for k in counts))
    for run in runs
  ]
  return html.table(head, rows)


def _differences(runs: Sequence[Run], measure: str) -> str:
  rows = []
  for row in runs:
    cells = []
    for column in runs:
      found = None if row is column else paired(row, column, measure, by="question")
      text = "" if found is None else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
      cells.append(f"<b>{text}</b>" if found is not None and found.low * found.high > 0 else text)
    rows.append((html.escape(_label(row, runs)), *cells))
  return html.table(("", *(_label(run, runs) for run in runs)), rows)


def _costs(runs: Sequence[Run]) -> str:
  names = list(dict.fromkeys(name for run in runs for name in run.get("cost", {})))
  head = ("system", *(name.replace("_", " ") for name in names))
  rows = [
    (html.escape(_label(run, runs)), *(_number(run["cost"].get(name)) for name in names))
    for run in runs
    if "cost" in run
  ]
  return html.table(head, rows)


def _number(value: float | None) -> str:
  return "" if value is None else f"{value:,.2f}".removesuffix(".00")


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 56, 130, 16, 44


def _plot(runs: Sequence[Run], measure: str) -> str:
  """Score against tokens as SVG; runs without costs are left out."""
  costed = [run for run in runs if run.get("cost", {}).get("tokens_per_question", 0) > 0]
  if not costed:
    return _note("No run has costs.")
  points = [(run["cost"]["tokens_per_question"], run["measures"][measure]["overall"][0]) for run in costed]
  competing = [i for i, run in enumerate(costed) if run["system"] != "oracle"]
  front = [competing[i] for i in pareto([points[i] for i in competing])]
  ends = [run["measures"][measure]["overall_by_question"][1:] for run in costed]
  decades = math.floor(math.log10(min(x for x, _ in points))), math.ceil(math.log10(max(x for x, _ in points)) + 1e-9)
  top = max(0.1, math.ceil(10 * max(high for _, high in ends)) / 10)

  def across(x: float) -> float:
    return _LEFT + (math.log10(x) - decades[0]) / (decades[1] - decades[0]) * (_WIDTH - _LEFT - _RIGHT)

  def down(y: float) -> float:
    return _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM)

  parts = [_grid(across, down, decades, top, measure)]
  line = " ".join(f"{across(points[i][0]):.1f},{down(points[i][1]):.1f}" for i in front)
  parts.append(f'<polyline points="{line}" fill="none" stroke="#111" stroke-width="1.5" stroke-dasharray="5 3"/>')
  for i, (run, (x, y), (low, high)) in enumerate(zip(costed, points, ends, strict=True)):
    px, py, fill = across(x), down(y), "#111" if i in front else "#fff"
    parts.append(f'<path d="M{px:.1f} {down(low):.1f}V{down(high):.1f}" stroke="#777"/>')
    parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{fill}" stroke="#111"/>')
    parts.append(f'<text x="{px + 8:.1f}" y="{py - 5:.1f}">{html.escape(_label(run, runs))}</text>')
  said = "; ".join(f"{run['system']} {y:.3f} at {x:.0f} tokens" for run, (x, y) in zip(costed, points, strict=True))
  return (
    f'<figure><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
    f'height="{_HEIGHT}" role="img" aria-label="{html.escape(said)}" font-family="system-ui,sans-serif" font-size="12" '
    f'fill="#111"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>{"".join(parts)}</svg></figure>'
  )


def _grid(across: Any, down: Any, decades: tuple[int, int], top: float, measure: str) -> str:
  parts = []
  for i in range(6):
    y = top * i / 5
    parts.append(f'<path d="M{_LEFT} {down(y):.1f}H{_WIDTH - _RIGHT}" stroke="#e0e0e0"/>')
    parts.append(f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{y:.2f}</text>')
  for power in range(decades[0], decades[1] + 1):
    x = across(10.0**power)
    parts.append(f'<path d="M{x:.1f} {_HEIGHT - _BOTTOM}v5" stroke="#111"/>')
    parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{10**power:,}</text>')
  parts.append(f'<path d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_WIDTH - _RIGHT}" fill="none" stroke="#111"/>')
  middle = (_LEFT + _WIDTH - _RIGHT) / 2
  parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">tokens a question</text>')
  return "".join(parts)


def _note(text: str) -> str:
  return f'<p class="note">{html.escape(text)}</p>'


def _missing(run: Run) -> str:
  if not run["missing"]:
    return ""
  shown = html.escape(_listed(run["missing"]))
  return f"<p><b>{len(run['missing'])} questions without an answer</b>, scored as wrong: {shown}</p>"


def _scores(run: Run) -> str:
  kinds = list(run["counts"])
  parts = ("overall", "answerable", "abstention")
  head = (
    "measure",
    "all",
    "without adversarial",
    "adversarial or to abstain",
    *(f"{k} ({run['counts'][k]})" for k in kinds),
  )
  rows = [
    (html.escape(name), *(_triple(row[p]) for p in parts), *(_triple(row["kinds"].get(k, _NONE)) for k in kinds))
    for name, row in run["measures"].items()
  ]
  return "<h2>Scores</h2>" + html.table(head, rows) + _note("Brackets: bootstrap over conversations.")


def _judge(run: Run) -> str:
  """What to think of the measure `judge`: the judge's errors on known answers, what it left open, what it took."""
  if "judge" not in run:
    return ""
  judge, spent = run["judge"], run["judge"]["spent"]
  known = judge["calibration"]
  rows = [
    ("model", html.escape(judge["model"])),
    (f"right answers called correct, of {known['right']}", _share(known["recall"])),
    (f"planted wrong answers called wrong, of {known['wrong']}", _share(known["specificity"])),
    ("known answers without a verdict", str(known["unjudged"])),
    ("answers without a verdict, in no mean", str(len(judge["unjudged"]))),
    ("requests, of which cached, of which failed", f"{spent['requests']}, {spent['cached']}, {spent['failed']}"),
    ("tokens of prompts, of replies", f"{spent['prompt_tokens']:,}, {spent['completion_tokens']:,}"),
    *([("money", f"{spent['money']:.4f}")] if spent["money"] is not None else []),
  ]
  parts = ["<h2>Judge</h2>", html.table(("", ""), rows)]
  if not judge["comparable"]:
    parts.append("<p><b>Too many answers went unjudged: do not compare this score with that of other runs.</b></p>")
  if judge["unjudged"]:
    parts.append(_note(f"Without a verdict: {_listed(judge['unjudged'])}"))
  return "".join(parts)


def _share(value: float | None) -> str:
  return "none" if value is None else f"{value:.3f}"


def _listed(names: Sequence[str]) -> str:
  return ", ".join(names[:50]) + (" …" if len(names) > 50 else "")


def _cost(run: Run) -> str:
  if "cost" not in run:
    return ""
  rows = [(html.escape(name.replace("_", " ")), _number(value)) for name, value in run["cost"].items()]
  return "<h2>Cost</h2>" + html.table(("", ""), rows)


def _answers(workdir: pathlib.Path, run: Run) -> str:
  scores = next(iter(run["measures"].values()))["scores"]
  rows: list[tuple[str, ...]] = []
  for path in sorted((workdir / "conversations").glob("*.json")):
    for a in json.loads(path.read_bytes())["answers"]:
      if len(rows) < _SHOWN and a["id"] in scores:
        cells = (a["kind"], a["question"], " / ".join(a["gold"]) or "(abstain)", a["answer"] or "")
        rows.append((*map(html.escape, cells), f"{scores[a['id']]:.2f}"))
  if not rows:
    return ""
  head = ("kind", "question", "right answers", "answer", next(iter(run["measures"])))
  return f"<h2>The first {len(rows)} answers</h2>" + html.table(head, rows)


def main() -> None:
  parser = argparse.ArgumentParser(description="Compares finished benchmark runs on one page.")
  parser.add_argument("--out", default="comparison.html")
  parser.add_argument("--measure", default="")
  parser.add_argument("runs", nargs="+")
  options = parser.parse_args()
  try:
    page = comparison([read_results(run) for run in options.runs], options.measure)
    pathlib.Path(options.out).write_text(page, encoding="utf-8")
  except (OSError, ValueError) as error:
    sys.exit(f"error: {error}")
  print(f"comparison: {options.out}")


if __name__ == "__main__":
  main()
