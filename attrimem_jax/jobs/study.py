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

import jax
import numpy as np
from ml_collections import ConfigDict
from scipy import stats

from attrimem_jax.arms import ARMS, arm_config
from attrimem_jax.evaluation.bootstrap import Interval, crossed_interval
from attrimem_jax.io.metrics import read_rows, write_json
from attrimem_jax.jobs.grpo import run_grpo
from attrimem_jax.jobs.run import Run
from attrimem_jax.view.study import write_page, write_pictures

# What of a training run's metrics is kept, step by step.
CURVES = ("reward", "memory_tokens", "rejected", "flat_groups", "kl", "entropy")


def run_study(config: ConfigDict, run: Run) -> None:
  """Makes the runs that are missing; writes study.json, study.html, pictures and a table after each."""
  plan = [(arm, config.seed + i) for i in range(config.study.seeds) for arm in config.study.arms]
  path = run.workdir / "study.json"
  results = {(r["arm"], r["seed"]): r for r in read_results(path)}
  run.keep_config()
  missing = [pair for pair in plan if pair not in results]
  with run.progress(len(plan) - len(missing), len(plan), "run") as progress:
    for number, (arm, seed) in enumerate(missing, len(plan) - len(missing) + 1):
      print(f"--- run {number} of {len(plan)}: {arm}, seed {seed}", flush=True)
      chosen = arm_config(config, arm, seed)
      with Run(chosen, run.workdir / arm / f"seed_{seed}") as inner:
        run_grpo(chosen, inner)
        if inner.stopping:
          return
      results[arm, seed] = result(arm, seed, inner.workdir)
      write_json(path, {"runs": list(results.values())}, indent=None)
      show(run.workdir, list(results.values()))
      progress.show(number, {})
      if run.stopping:
        return
      jax.clear_caches()  # every run has programs of its own, which would pile up
  print(f"page: {run.workdir / 'study.html'}; numbers: {path}", flush=True)


def show(workdir: pathlib.Path, results: Sequence[Mapping[str, Any]]) -> None:
  """Prints the table and writes page and pictures of what there is so far."""
  summary = summarise(results)
  write_page(workdir / "study.html", summary)
  for picture in write_pictures(workdir, summary):
    print(f"picture: {picture}", flush=True)
  print(table(summary), flush=True)


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
  """The runs of a study.json; none where there is no such file.

  Raises:
    ValueError: the file is no study.
  """
  if not path.is_file():
    return []
  try:
    found = json.loads(path.read_text(encoding="utf-8"))["runs"]
    for run in found:
      lacking = {"arm", "seed", "evaluations", "kinds", "curves", "seconds"} - set(run)
      if lacking or run["arm"] not in ARMS or not run["evaluations"]:
        raise ValueError(f"a run without {', '.join(sorted(lacking)) or 'a known arm or evaluations'}")
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path} is damaged ({error}): bring it back, or remove it to collect the runs again") from None
  return found


def result(arm: str, seed: int, workdir: pathlib.Path) -> dict[str, Any]:
  """What is kept of one run: its evaluations with the score of every conversation, and its curves.

  Returns:
    {"arm", "seed", "evaluations": [{"step", metrics …, "scores": {history: [sum, questions]}}],
    "kinds": {kind of question: such scores of the last evaluation},
    "curves": {name: [one number per step]}, "seconds": of its training steps}.
  """
  rows = read_rows(workdir / "metrics.jsonl")
  evaluations, kinds = [], {}
  for row in rows:
    if "eval/accuracy" in row:
      answers = read_rows(workdir / "evaluations" / f"step_{row['step']:06d}.jsonl")
      scores = _by_history(answers)
      kinds = {
        kind: _by_history([a for a in answers if a["kind"] == kind]) for kind in sorted({a["kind"] for a in answers})
      }
      metrics = {name.removeprefix("eval/"): _short(v) for name, v in row.items() if name.startswith("eval/")}
      evaluations.append({"step": row["step"], **metrics, "scores": scores})
  steps = [row for row in rows if "train/reward" in row]
  curves = {name: [_short(row.get(f"train/{name}")) for row in steps] for name in CURVES}
  seconds = sum(v for row in steps for name, v in row.items() if name.startswith("time/"))
  return {
    "arm": arm,
    "seed": seed,
    "evaluations": evaluations,
    "kinds": kinds,
    "curves": curves,
    "seconds": round(seconds),
  }


def _by_history(answers: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
  scores: dict[str, list[float]] = {}
  for answer in answers:
    of = scores.setdefault(answer["history"], [0.0, 0])
    of[0], of[1] = of[0] + answer["score"], of[1] + 1
  return scores


def _short(value: Any) -> Any:
  return float(f"{value:.5g}") if isinstance(value, float) else value


def summarise(results: Sequence[Mapping[str, Any]], samples: int = 10_000) -> dict[str, Any]:
  """Means, intervals and paired differences of the arms at their last evaluation, and the curves.

  Args:
    results: of `result`, any arms and seeds. Differences use the seeds that both arms have.
    samples: of the bootstrap over runs and conversations.

  Returns:
    {"arms": {arm: …}, "differences": {"a - b": {"mean", "low", "high", "seeds", "by_seed", "t_low", "t_high"}},
    "over_training": the same of the mean over all evaluations after the start, which tells who learns faster,
    "kinds": {kind: of the questions of this kind alone: {"arms": {arm: interval}, "differences": {"a - b": …}}},
    "curves": {arm: …}}.
  """
  arms = {name: [r for r in results if r["arm"] == name] for name in ARMS if any(r["arm"] == name for r in results)}
  found: dict[str, Any] = {"arms": {}, "differences": {}, "over_training": {}, "kinds": {}, "curves": {}}
  reach = _reach(arms["outcome"]) if "outcome" in arms else None
  for name, runs in arms.items():
    last = [run["evaluations"][-1] for run in runs]
    interval = crossed_interval(*_matrix([e["scores"] for e in last]), samples=samples)
    found["arms"][name] = {
      "seeds": [run["seed"] for run in runs],
      "accuracy": vars(interval),
      "by_seed": [e["accuracy"] for e in last],
      "memory_tokens": _mean(e["memory_tokens"] for e in last),
      "fact_recall": _mean(e.get("fact_recall") for e in last),
      "fact_precision": _mean(e.get("fact_precision") for e in last),
      "needed_tokens": _mean(e.get("needed_tokens") for e in last),
      "rejected": _mean(e["rejected"] for e in last),
      "flat_groups": _mean(v for run in runs for v in run["curves"]["flat_groups"]),
      "steps_to_outcome": None if reach is None else _first_above(runs, reach),
      "seconds": _mean(run["seconds"] for run in runs),
    }
    found["curves"][name] = dict(_curve(runs))
  names = list(arms)
  for i, b in enumerate(names):
    for a in names[i + 1 :]:
      found["differences"] |= _difference(a, b, _last_scores(arms[a]), _last_scores(arms[b]), samples)
      found["over_training"] |= _difference(a, b, _mean_scores(arms[a]), _mean_scores(arms[b]), samples)
  for kind in sorted({kind for run in results for kind in run.get("kinds", {})}):
    found["kinds"][kind] = _of_kind(arms, kind, samples)
  return found


Scores = Mapping[str, Sequence[float]]  # history: [sum of scores, questions]


def _last_scores(runs: Sequence[Mapping[str, Any]]) -> dict[int, Scores]:
  """Scores of the last evaluation, by seed."""
  return {run["seed"]: run["evaluations"][-1]["scores"] for run in runs}


def _mean_scores(runs: Sequence[Mapping[str, Any]]) -> dict[int, Scores]:
  """Scores by seed, averaged over the evaluations after the first step; none of a run that made no step."""
  found: dict[int, Scores] = {}
  for run in runs:
    later = [e["scores"] for e in run["evaluations"] if e["step"]]
    if later:
      found[run["seed"]] = {
        h: [float(np.mean([of[h][0] for of in later])), count] for h, (_, count) in later[0].items()
      }
  return found


def _of_kind(arms: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, samples: int) -> dict[str, Any]:
  """Intervals of arms and of differences on the questions of one kind."""
  scores = {
    name: {r["seed"]: r["kinds"][kind] for r in runs if kind in r.get("kinds", {})} for name, runs in arms.items()
  }
  scores = {name: of for name, of in scores.items() if of}
  found: dict[str, Any] = {"arms": {}, "differences": {}}
  for i, (b, of_b) in enumerate(scores.items()):
    found["arms"][b] = vars(crossed_interval(*_matrix(list(of_b.values())), samples=samples))
    for a, of_a in list(scores.items())[i + 1 :]:
      found["differences"] |= _difference(a, b, of_a, of_b, samples)
  return found


def _matrix(scores: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
  """Sums of scores [R, C] and questions [C] of evaluations that asked the same."""
  questions = [{history: count for history, (_, count) in of.items()} for of in scores]
  if any(q != questions[0] for q in questions):
    raise ValueError("these runs were asked different questions: give all of them the same config.eval and data.seed")
  histories = list(questions[0])
  sums = np.array([[of[h][0] for h in histories] for of in scores], np.float64)
  return sums, np.array([questions[0][h] for h in histories], np.float64)


def _difference(a: str, b: str, of_a: Mapping[int, Scores], of_b: Mapping[int, Scores], samples: int) -> dict[str, Any]:
  """Of scores by seed, over the seeds that both arms have; nothing where there is none."""
  seeds = [seed for seed in of_a if seed in of_b]
  if not seeds:
    return {}
  sums, counts = _matrix([of[seed] for seed in seeds for of in (of_a, of_b)])
  differences = sums[::2] - sums[1::2]
  interval = crossed_interval(differences, counts, samples=samples)
  by_seed = [float(d) for d in differences.sum(1) / counts.sum()]
  t_low, t_high = _student(by_seed)
  return {f"{a} - {b}": {**vars(interval), "seeds": seeds, "by_seed": by_seed, "t_low": t_low, "t_high": t_high}}


def _student(values: Sequence[float], confidence: float = 0.95) -> tuple[float | None, float | None]:
  """Ends of Student's interval of the mean of runs, the questions being fixed; None of a single run.

  It knows that few runs tell little about their own spread, which resampling them does not.
  """
  if len(values) < 2:
    return None, None
  half = stats.t.ppf((1 + confidence) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
  return float(np.mean(values) - half), float(np.mean(values) + half)


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
  head += f"{'needed':>8s}{'rejected':>9s}{'flat':>6s}"
  lines = [head]
  for name, arm in summary["arms"].items():
    numbers = [
      "" if arm[key] is None else f"{arm[key]:.{places}f}"
      for key, places in (
        ("memory_tokens", 1),
        ("fact_recall", 3),
        ("fact_precision", 3),
        ("needed_tokens", 3),
        ("rejected", 3),
        ("flat_groups", 2),
      )
    ]
    widths = (7, 8, 10, 8, 9, 6)
    cells = "".join(f"{cell:>{width}s}" for cell, width in zip(numbers, widths, strict=True))
    lines.append(f"{name:18s}{len(arm['seeds']):6d}  {Interval(**arm['accuracy'])!s:24s}{cells}")
  for name, found in summary["differences"].items():
    interval = Interval(found["mean"], found["low"], found["high"])
    sure = "" if found["low"] <= 0 <= found["high"] else "  (0 is outside)"
    runs = "" if found["t_low"] is None else f"  between runs [{found['t_low']:+.3f}, {found['t_high']:+.3f}]"
    lines.append(f"{name:34s}{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]{runs}{sure}")
  for kind, of in summary["kinds"].items():
    lines.append(f"{kind:18s}" + "  ".join(f"{name} {Interval(**found)!s}" for name, found in of["arms"].items()))
  return "\n".join(lines)
