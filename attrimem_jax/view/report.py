"""The report of a run: one HTML file from what the run directory holds, complete or not.

It reads config.json, metrics.jsonl and the newest file of rollouts. A part whose data are missing says so.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrimem_jax.io import models
from attrimem_jax.io.metrics import read_rows
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.view import html
from attrimem_jax.view.charts import Series, line_chart

Row = Mapping[str, Any]


def write_report(workdir: str | pathlib.Path) -> pathlib.Path:
  """Writes <workdir>/report.html and returns its path.

  Raises:
    ValueError: there is no such directory.
  """
  folder = pathlib.Path(workdir)
  if not folder.is_dir():
    raise ValueError(f"no run directory at {str(folder)!r}: give the --workdir of a run")
  config = _config(folder)
  metrics = read_rows(folder / "metrics.jsonl")
  newest = max((folder / "rollouts").glob("step_*.jsonl"), default=None)
  title = f"Run {folder.resolve().name}"
  body = [f"<h1>{html.escape(title)}</h1>", _subject(config), _headline(metrics), _curves(metrics), _times(metrics)]
  body += [_examples(newest, _tokenizer(config)), _settings(config)]
  path = folder / "report.html"
  path.write_text(html.document(title, "\n".join(body)), encoding="utf-8")
  return path


def _config(folder: pathlib.Path) -> dict[str, Any]:
  path = folder / "config.json"
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError):
    return {}


def _tokenizer(config: Row) -> Tokenizer | None:
  """The policy's tokenizer, or None where it is not at hand: rollouts are then shown without colours."""
  try:
    spec = config["policy"]["model"]
    return models.load_tokenizer(spec) if models.is_local(spec) else None
  except (KeyError, TypeError, ValueError, OSError):
    return None


def curve(metrics: Sequence[Row], name: str) -> tuple[list[float], list[float]]:
  """Steps and values of one metric, where it is a finite number."""
  points = [(row["step"], row[name]) for row in metrics if _number(row.get(name)) and _number(row.get("step"))]
  return [x for x, _ in points], [y for _, y in points]


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and math.isfinite(value)


def _note(text: str) -> str:
  return f'<p class="note">{html.escape(text)}</p>'


def _subject(config: Row) -> str:
  if not config:
    return _note("No config.json that can be read.")
  policy, answer, data = (config.get(part) or {} for part in ("policy", "answer", "data"))
  text = f"job {config.get('job')}, policy {policy.get('model')}, answer model {answer.get('model')}"
  return _note(f"{text}, data {data.get('name')}, seed {config.get('seed')}")


def _headline(metrics: Sequence[Row]) -> str:
  """Accuracy before and after with intervals, and the first and last of what moves during training."""
  evaluated = [row for row in metrics if _number(row.get("eval/accuracy"))]
  parts = ["<h2>Result</h2>"]
  if evaluated:
    parts.append(f"<p>{_accuracy_sentence(evaluated)}</p>")
  rows = [row for name, label in _MOVING for row in _moved(metrics, name, label)]
  if rows:
    parts.append(html.table(("", "first", "last", "difference"), rows))
    parts.append(_note("Of training, first and last are means of up to five steps."))
  return "\n".join(parts) if len(parts) > 1 else "\n".join([*parts, _note("No metrics yet.")])


_MOVING = (
  ("eval/accuracy", "held-out accuracy"),
  ("eval/memory_tokens", "tokens of memory, held out"),
  ("train/reward", "reward"),
  ("train/kl", "KL from the starting policy"),
  ("train/memory_tokens", "tokens of memory"),
  ("train/rejected", "share of rejected actions"),
  ("train/credit_nonzero", "share of sources with credit"),
  ("train/attribution_lds", "faithfulness of credit (LDS)"),
  ("train/loss", "loss"),
)


def _accuracy_sentence(evaluated: Sequence[Row]) -> str:
  first, last = evaluated[0], evaluated[-1]
  questions = f" on {last['eval/questions']:.0f} questions" if _number(last.get("eval/questions")) else ""
  if first is last:
    return f"Held-out accuracy <b>{_interval(last)}</b>{questions} at step {last.get('step')}."
  change = last["eval/accuracy"] - first["eval/accuracy"]
  return (
    f"Held-out accuracy went from {_interval(first)} at step {first.get('step')} to <b>{_interval(last)}</b> at step "
    f"{last.get('step')}{questions}: a difference of <b>{change:+.3f}</b>. Brackets hold bootstrap intervals over "
    "conversations; both evaluations ask the same questions, so the difference is surer than the intervals suggest."
  )


def _interval(row: Row) -> str:
  low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
  span = f" [{low:.3f}, {high:.3f}]" if _number(low) and _number(high) else ""
  return f"{row['eval/accuracy']:.3f}{span}"


def _moved(metrics: Sequence[Row], name: str, label: str) -> Iterator[tuple[str, ...]]:
  _, values = curve(metrics, name)
  if not values:
    return
  few = 1 if name.startswith("eval/") else min(5, max(1, len(values) // 2))
  first, last = sum(values[:few]) / few, sum(values[-few:]) / few
  yield html.escape(label), f"{first:.4g}", f"{last:.4g}", f"{last - first:+.3g}" if len(values) > 1 else ""


def _curves(metrics: Sequence[Row]) -> str:
  evaluated = [row for row in metrics if _number(row.get("eval/accuracy"))]
  steps, accuracy = curve(evaluated, "eval/accuracy")
  ends = [[r[key] if _number(r.get(key)) else r["eval/accuracy"] for r in evaluated] for key in _ENDS]
  held_out = [Series("with interval", steps, accuracy, ends[0], ends[1]), Series("", steps, accuracy, line=True)]
  charts = [line_chart("Held-out accuracy", held_out)]
  for name, title in (("train/reward", "Reward"), ("train/loss", "Training loss"), ("eval/loss", "Held-out loss")):
    if name != "train/reward" and charts[-1] and name == "train/loss":
      continue  # the loss of a policy gradient says nothing where there is a reward
    steps, values = curve(metrics, name)
    mean = Series("mean of 5", steps, smooth(values, 5), line=True)
    charts.append(line_chart(title, [Series("step", steps, values), mean]))
  return "\n".join(["<h2>Curves</h2>", *(f"<figure>{c}</figure>" for c in charts if c)]) if any(charts) else ""


_ENDS = ("eval/accuracy_low", "eval/accuracy_high")


def smooth(values: Sequence[float], width: int) -> list[float]:
  """The mean of each value and up to `width` - 1 before it."""
  windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
  return [sum(window) / len(window) for window in windows]


def _times(metrics: Sequence[Row]) -> str:
  """Seconds of each phase; the first step stands apart, since it compiles."""
  names = dict.fromkeys(name for row in metrics for name in row if name.startswith("time/"))
  phases = {name.removeprefix("time/"): curve(metrics, name)[1] for name in names}
  phases = {name: values for name, values in phases.items() if values}
  if not phases:
    return ""
  later = {name: sum(values[1:]) / max(1, len(values) - 1) for name, values in phases.items()}
  total = sum(later.values())
  rows = [
    (html.escape(name), f"{values[0]:.2f}", *_share(later[name], total, len(values))) for name, values in phases.items()
  ]
  rows.append(
    ("all", f"{sum(v[0] for v in phases.values()):.2f}", *_share(total, total, max(map(len, phases.values()))))
  )
  head = ("phase", "first step, s", "later steps, mean s", "share")
  return "<h2>Time</h2>" + html.table(head, rows) + _note("The first step of a process compiles its programs.")


def _share(seconds: float, total: float, count: int) -> tuple[str, str]:
  return (f"{seconds:.2f}", f"{seconds / total:.0%}" if total else "") if count > 1 else ("", "")


def _examples(path: pathlib.Path | None, tokenizer: Tokenizer | None) -> str:
  """The best and the worst rollout of the group in which they differ most."""
  rows = [row for row in (read_rows(path) if path else []) if row.get("calls")]
  if not rows:
    return "<h2>Rollouts</h2>" + _note("No rollouts: evaluation and warm starts write none.")
  step = int(path.stem.rpartition("_")[2]) if path else 0
  parts = [f"<h2>Rollouts of step {step}</h2>"]
  if tokenizer is None:
    parts.append(_note("The policy's tokenizer is not at hand, so what it wrote is shown without colours."))
  else:
    parts.append(_strongest(rows, tokenizer))
  return "\n".join([*parts, *(_rollout(row, tokenizer) for row in _contrast(rows))])


def _strongest(rows: Sequence[Row], tokenizer: Tokenizer, count: int = 12) -> str:
  """The tokens that push the policy most, by |advantage| · (1 − p): a bound on what each does to the logits."""
  found = []
  for row in rows:
    for call in row["calls"]:
      for at, (logp, advantage) in enumerate(zip(call["logps"], call["advantages"], strict=True)):
        found.append((abs(advantage) * -math.expm1(min(0.0, logp)), row, call, at))
  found.sort(key=lambda item: -item[0])
  cells = []
  for push, row, call, at in found[:count]:
    pieces = tokenizer.pieces(call["ids"])
    before, token, after = pieces[max(0, at - 12) : at], pieces[at : at + 1], pieces[at + 1 : at + 5]
    said, bold, rest = (html.escape(b"".join(some).decode(errors="replace")) for some in (before, token, after))
    where = f"{html.escape(str(row.get('history')))}, rollout {row.get('rollout')}"
    numbers = (f"{push:.3g}", f"{call['advantages'][at]:+.3g}", f"{math.exp(call['logps'][at]):.3g}")
    cells.append((*numbers, f"{said}<b>{bold.replace(chr(10), '↵')}</b>{rest}", where))
  head = ("push", "advantage", "probability", "token among its neighbours", "where")
  return "<h3>Tokens that push most</h3>" + html.table(head, cells)


def _contrast(rows: Sequence[Row]) -> list[Row]:
  groups: list[list[Row]] = []
  for row in rows:
    if not groups or row.get("rollout", 0) == 0:
      groups.append([])
    groups[-1].append(row)

  def reward(row: Row) -> float:
    return row["reward"] if _number(row.get("reward")) else -math.inf

  scored = [sorted(filter(lambda r: _number(r.get("reward")), group), key=reward) for group in groups]
  best = max((group for group in scored if group), key=lambda g: reward(g[-1]) - reward(g[0]), default=groups[0])
  return [best[-1], best[0]] if len(best) > 1 else best


def _rollout(row: Row, tokenizer: Tokenizer | None) -> str:
  reward = f"{row['reward']:.3f}" if _number(row.get("reward")) else "none"
  parts = [f"<h3>{html.escape(str(row.get('history')))}, rollout {row.get('rollout')}: reward {reward}</h3>"]
  answers = row.get("answers") or []
  cells = [
    (
      *(html.escape(str(x)) for x in (a["question"], " / ".join(a["gold"]) or "(not known)", a["answer"])),
      f"{a['score']:.2f}",
    )
    for a in answers
  ]
  if cells:
    parts.append(html.table(("question", "right answers", "answer", "score"), cells))
  calls = [call for call in row["calls"] if call.get("ids")]
  return "\n".join([*parts, _plain(calls) if tokenizer is None else _coloured(calls, tokenizer)])


_COLOURS = {
  "attribution": {"up": "made the answers likelier", "down": "made them less likely", "none": "in no context"},
  "advantages": {"up": "reinforced", "down": "discouraged", "none": ""},
}


def _plain(calls: Sequence[Row]) -> str:
  rows = [(_where(call), html.box(html.escape(call["text"])) + _refusals(call)) for call in calls]
  return html.table(("call", "written"), rows)


def _coloured(calls: Sequence[Row], tokenizer: Tokenizer) -> str:
  """What the calls of a rollout wrote, once in the colours of attribution and beside it in those of advantage."""
  scales = {name: html.largest(value for call in calls for value in call[name]) for name in _COLOURS}
  rows = []
  for call in calls:
    pieces = tokenizer.pieces(call["ids"])
    boxes = [
      html.box(html.tokens(pieces, call[name], scale=scale, name=name.removesuffix("s")))
      for name, scale in scales.items()
    ]
    rows.append((_where(call), boxes[0] + _refusals(call), boxes[1]))
  legends = "".join(html.legend(scale, **_COLOURS[name]) for name, scale in scales.items())
  return legends + html.table(("call", "written, by attribution", "by advantage"), rows)


def _where(call: Row) -> str:
  return f"session&nbsp;{call['session'] + 1}<br>{html.escape(str(call['module']))}"


def _refusals(call: Row) -> str:
  refused = [action for action in call.get("actions") or () if action["reason"] != "ok"]
  if not refused:
    return ""
  items = "; ".join(f"{html.escape(a['line'].strip())!s} ({html.escape(a['reason'])})" for a in refused)
  return f'<div style="font-size:12px;color:#555">refused: {items}</div>'


def _settings(config: Row) -> str:
  if not config:
    return ""
  text = html.escape(json.dumps(config, indent=1, ensure_ascii=False))
  return f"<h2>Configuration</h2>\n<details><summary>config.json</summary><pre>{text}</pre></details>"
