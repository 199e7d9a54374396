"""Arms times seeds: the same training run with one thing changed, several times each, and what the intervals say.

Runs are made one after another, all arms of a seed before the next seed, so that what is there at any time is as
balanced as can be. A run that has ended is not made again, and one that was stopped goes on from its checkpoint, so the
same command finishes a study that was interrupted. Runs of one seed read the same histories in all arms, and all runs
are asked the same held-out questions: arms are compared in pairs, by seed and conversation.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from attrimem_jax.evaluation.bootstrap import Interval, crossed_interval
from attrimem_jax.io.metrics import read_rows, write_json
from attrimem_jax.jobs.arms import ARMS, arm_config
from attrimem_jax.jobs.grpo import run_grpo
from attrimem_jax.jobs.run import Run
from attrimem_jax.view.study import write_page

# What of a training run's metrics is kept, step by step.
CURVES = ("reward", "memory_tokens", "rejected", "flat_groups", "kl", "entropy")


def run_study(config: ConfigDict, run: Run) -> None:
  """Makes the runs that are missing; writes study.json, study.html and a table after each."""
  plan = [(arm, config.seed + i) for i in range(config.study.seeds) for arm in config.study.arms]
  path = run.workdir / "study.json"
  results = {(r["arm"], r["seed"]): r for r in read_results(path)}
  for number, (arm, seed) in enumerate(plan, 1):
    if (arm, seed) in results:
      continue
    print(f"--- run {number} of {len(plan)}: {arm}, seed {seed}", flush=True)
    chosen = arm_config(config, arm, seed)
    with Run(chosen, run.workdir / arm / f"seed_{seed}") as inner:
      run_grpo(chosen, inner)
      if inner.stopping:
        return
    results[arm, seed] = result(arm, seed, inner.workdir)
    write_json(path, {"runs": list(results.values())})
    summary = summarise(list(results.values()))
    write_page(run.workdir / "study.html", summary)
    print(table(summary), flush=True)
  print(f"page: {run.workdir / 'study.html'}; numbers: {path}", flush=True)


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
  """The runs of a study.json; none where there is no such file.

  Raises:
    ValueError: the file is no study.
  """
  if not path.is_file():
    return []
  try:
    return json.loads(path.read_text(encoding="utf-8"))["runs"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}): bring it back, or remove it to collect the runs again") from None


def result(arm: str, seed: int, workdir: pathlib.Path) -> dict[str, Any]:
  """What is kept of one run: its evaluations with the score of every conversation, and its curves.

  Returns:
    {"arm", "seed", "evaluations": [{"step", metrics …, "scores": {history: [sum, questions]}}],
    "curves": {name: [one number per step]}, "seconds": of its training steps}.
  """
  rows = read_rows(workdir / "metrics.jsonl")
  evaluations = []
  for row in rows:
    if "eval/accuracy" in row:
      answers = workdir / "evaluations" / f"step_{row['step']:06d}.jsonl"
      scores: dict[str, list[float]] = {}
      for line in answers.read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        of = scores.setdefault(answer["history"], [0.0, 0])
        of[0], of[1] = of[0] + answer["score"], of[1] + 1
      metrics = {name.removeprefix("eval/"): _short(v) for name, v in row.items() if name.startswith("eval/")}
      evaluations.append({"step": row["step"], **metrics, "scores": scores})
  steps = [row for row in rows if "train/reward" in row]
  curves = {name: [_short(row.get(f"train/{name}")) for row in steps] for name in CURVES}
  seconds = sum(v for row in steps for name, v in row.items() if name.startswith("time/"))
  return {"arm": arm, "seed": seed, "evaluations": evaluations, "curves": curves, "seconds": round(seconds)}


def _short(value: Any) -> Any:
  return float(f"{value:.5g}") if isinstance(value, float) else value


def summarise(results: Sequence[Mapping[str, Any]], samples: int = 10_000) -> dict[str, Any]:
  """Means, intervals and paired differences of the arms at their last evaluation, and the curves.

  Args:
    results: of `result`, any arms and seeds. Differences use the seeds that both arms have.
    samples: of the bootstrap over runs and conversations.

  Returns:
    {"arms": {arm: …}, "differences": {"a - b": {"mean", "low", "high", "seeds", "by_seed"}}, "curves": {arm: …}}.
  """
  arms = {name: [r for r in results if r["arm"] == name] for name in ARMS if any(r["arm"] == name for r in results)}
  found: dict[str, Any] = {"arms": {}, "differences": {}, "curves": {}}
  reach = _reach(arms["outcome"]) if "outcome" in arms else None
  for name, runs in arms.items():
    last = [run["evaluations"][-1] for run in runs]
    interval = crossed_interval(*_matrix(last), samples=samples)
    found["arms"][name] = {
      "seeds": [run["seed"] for run in runs],
      "accuracy": vars(interval),
      "by_seed": [e["accuracy"] for e in last],
      "memory_tokens": _mean(e["memory_tokens"] for e in last),
      "fact_recall": _mean(e.get("fact_recall") for e in last),
      "fact_precision": _mean(e.get("fact_precision") for e in last),
      "rejected": _mean(e["rejected"] for e in last),
      "flat_groups": _mean(v for run in runs for v in run["curves"]["flat_groups"]),
      "steps_to_outcome": None if reach is None else _first_above(runs, reach),
      "seconds": _mean(run["seconds"] for run in runs),
    }
    found["curves"][name] = dict(_curve(runs))
  names = list(arms)
  for i, b in enumerate(names):
    for a in names[i + 1 :]:
      found["differences"] |= _difference(a, b, arms[a], arms[b], samples)
  return found


def _matrix(evaluations: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
  """Sums of scores [R, C] and questions [C] of evaluations that asked the same."""
  questions = [{history: count for history, (_, count) in e["scores"].items()} for e in evaluations]
  if any(q != questions[0] for q in questions):
    raise ValueError("these runs were asked different questions: give all of them the same config.eval and data.seed")
  histories = list(questions[0])
  sums = np.array([[e["scores"][h][0] for h in histories] for e in evaluations], np.float64)
  return sums, np.array([questions[0][h] for h in histories], np.float64)


def _difference(a: str, b: str, of_a, of_b, samples: int) -> dict[str, Any]:
  pairs = [(x, y) for x in of_a for y in of_b if x["seed"] == y["seed"]]
  if not pairs:
    return {}
  sums, counts = _matrix([run["evaluations"][-1] for pair in pairs for run in pair])
  differences = sums[::2] - sums[1::2]
  interval = crossed_interval(differences, counts, samples=samples)
  by_seed = [float(d) for d in differences.sum(1) / counts.sum()]
  return {f"{a} - {b}": {**vars(interval), "seeds": [x["seed"] for x, _ in pairs], "by_seed": by_seed}}


def _mean(values) -> float | None:
  numbers = [v for v in values if v is not None]
  return float(np.mean(numbers)) if numbers else None


def _reach(runs: Sequence[Mapping[str, Any]]) -> float:
  return float(np.mean([run["evaluations"][-1]["accuracy"] for run in runs]))


def _first_above(runs: Sequence[Mapping[str, Any]], level: float) -> float | None:
  """The step at which an arm's mean accuracy first reaches `level`, on straight lines between evaluations."""
  steps = sorted(set.intersection(*({e["step"] for e in run["evaluations"]} for run in runs)))
  means = [_mean(e["accuracy"] for run in runs for e in run["evaluations"] if e["step"] == s) or 0.0 for s in steps]
  before = None
  for step, mean in zip(steps, means, strict=True):
    if mean >= level:
      if before is None:
        return float(step)
      return before[0] + (step - before[0]) * (level - before[1]) / (mean - before[1])
    before = step, mean
  return None


def _curve(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[list[float]]]]:
  """Points (x, mean over runs, lowest, highest) of the held-out accuracy and of the training reward."""
  steps = sorted(set.intersection(*({e["step"] for e in run["evaluations"]} for run in runs)))
  at = [[e["accuracy"] for run in runs for e in run["evaluations"] if e["step"] == s] for s in steps]
  yield "accuracy", [[s, float(np.mean(v)), min(v), max(v)] for s, v in zip(steps, at, strict=True)]
  length = min(len(run["curves"]["reward"]) for run in runs)
  rewards = np.array([run["curves"]["reward"][:length] for run in runs], np.float64)
  yield "reward", [[i + 1, float(r.mean()), float(r.min()), float(r.max())] for i, r in enumerate(rewards.T)]


def table(summary: Mapping[str, Any]) -> str:
  """The summary as plain text: a line per arm, then a line per difference."""
  head = f"{'arm':18s}{'seeds':>6s}  {'accuracy':24s}{'memory':>7s}{'recall':>8s}{'precision':>10s}"
  head += f"{'rejected':>9s}{'flat':>6s}"
  lines = [head]
  for name, arm in summary["arms"].items():
    numbers = [
      "" if arm[key] is None else f"{arm[key]:.{places}f}"
      for key, places in (
        ("memory_tokens", 1),
        ("fact_recall", 3),
        ("fact_precision", 3),
        ("rejected", 3),
        ("flat_groups", 2),
      )
    ]
    widths = (7, 8, 10, 9, 6)
    cells = "".join(f"{cell:>{width}s}" for cell, width in zip(numbers, widths, strict=True))
    lines.append(f"{name:18s}{len(arm['seeds']):6d}  {Interval(**arm['accuracy'])!s:24s}{cells}")
  for name, found in summary["differences"].items():
    interval = Interval(found["mean"], found["low"], found["high"])
    sure = "" if found["low"] <= 0 <= found["high"] else "  (0 is outside)"
    lines.append(f"{name:34s}{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]{sure}")
  return "\n".join(lines)
