"""Which turns of a long history to keep: learned value against fixed policies and surface cues, job `retention`.

The table of arXiv 2606.12945 on a LongMemEval-S file: keep a share of all turns, count how many of the turns that carry
the answer are kept. Weights are learned on a random half of the cases, and both halves are scored: the one that they
were learned on, and the one that they never saw. Beside the policies stands a control that reads nothing but surface
cues of a turn (who speaks, how long, where), because how a benchmark was made explains a part of any gain.
"""

import datetime
import json
import lzma
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from attrimem_jax.evaluation.bootstrap import Interval, difference_interval
from attrimem_jax.io.metrics import write_json
from attrimem_jax.jobs.run import Run
from attrimem_jax.retention.factors import FACTORS, Known, Lexical, blind, by_speaker, oracle
from attrimem_jax.retention.value import Cases, budgets, hill_climb, kept, pairwise
from attrimem_jax.types import Question

LIVE = tuple(FACTORS.index(name) for name in ("emotion", "goal", "self", "reliability"))


def run_retention(config: ConfigDict, run: Run) -> None:
  """Writes <workdir>/retention.json: every policy's score on both halves, weights, and paired gaps with intervals."""
  settings = config.retention
  print(f"reading {config.data.path}", flush=True)
  tables, recency, surface, gold = read_cases(config.data.path, settings.regime, settings.turns, settings.cases)
  cases = Cases.pack(tables, gold)
  print(
    f"{len(gold)} cases with gold turns, {int(cases.size.sum())} turns ({settings.turns}), {settings.regime}",
    flush=True,
  )
  halves = splits(len(gold), settings.splits, config.seed)
  climbed = hill_climb(cases, halves, settings.keep, live=LIVE, seed=config.seed + 1)
  weights = pairwise(cases, halves, live=LIVE)
  scores = _fixed(cases, recency, settings.keep, len(halves), config.seed)
  for name, learned in (("learned", weights), ("learned by climbing", climbed)):
    scores[name] = np.stack([_score(cases, cases.factors @ w, settings.keep) for w in learned])
  scores["surface cues"] = _surface(cases, surface, halves, settings.keep)
  rows = {name: _summary(values, halves) for name, values in scores.items()}
  gaps = {name: _gap(scores["learned"], values, halves, config) for name, values in scores.items() if name != "learned"}
  _print(rows, gaps)
  content = {
    "regime": settings.regime,
    "turns": settings.turns,
    "cases": len(gold),
    "keep": settings.keep,
    "encoder": "lexical",
    "policies": rows,
    "learned_minus": {name: vars(gap) for name, gap in gaps.items()},
    "weights": {name: _mean_std(weights[:, FACTORS.index(name)]) for name in FACTORS},
    "config": config.to_dict(),
  }
  write_json(run.workdir / "retention.json", content)
  print(f"written: {run.workdir / 'retention.json'}", flush=True)


def splits(cases: int, repeats: int, seed: int) -> np.ndarray:
  """Random halves to learn on: bool [R, C], each row with ⌊C/2⌋ cases."""
  return np.stack([np.random.default_rng([seed, 100 + r]).permutation(cases) < cases // 2 for r in range(repeats)])


def read_cases(
  path: str, regime: str, turns: str = "all", most: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], list[list[int]]]:
  """Factors [n, 7], recency [n], surface cues [n, 13] and gold places of each case that has gold turns; first `most`
  cases of the file, 0 for all."""
  encoder = Lexical()
  found: tuple[list, list, list, list] = ([], [], [], [])
  for number, instance in enumerate(_instances(path)):
    if most and number >= most:
      break
    known, gold = known_turns(instance)
    ranked = np.flatnonzero(known.by_user) if turns == "user" else np.arange(len(known.texts))
    gold = np.flatnonzero(np.isin(ranked, gold)).tolist()
    if not gold:
      continue
    question = Question(instance["question_id"], instance["question"], (), instance["question_type"])
    values = blind(known, encoder).values if regime == "blind" else oracle(known, question, encoder).values
    age = np.where(np.isnan(known.age), np.inf, known.age)
    for column, value in zip(found, (values[ranked], -age[ranked], surface_cues(known)[ranked], gold), strict=True):
      column.append(value)
  if not found[0]:
    raise ValueError(f"{path} holds no case with gold turns: give a LongMemEval file with has_answer marks")
  return found


def known_turns(instance: dict[str, Any]) -> tuple[Known, list[int]]:
  """A LongMemEval instance as memories, one a turn, with the places of its gold turns; nothing of the question."""
  texts: list[str] = []
  by_user: list[bool] = []
  session: list[int] = []
  age: list[float] = []
  gold: list[int] = []
  dates = [_day(text) for text in instance["haystack_dates"]]
  newest = max((day for day in dates if day is not None), default=0.0)
  for number, (turns, day) in enumerate(zip(instance["haystack_sessions"], dates, strict=True)):
    for turn in turns:
      if turn.get("has_answer"):
        gold.append(len(texts))
      texts.append(turn["content"])
      by_user.append(turn["role"] == "user")
      session.append(number)
      age.append(np.nan if day is None else newest - day)
  users, nothing = np.array(by_user, bool), np.zeros(len(texts))
  known = Known(tuple(texts), by_speaker(users), users, np.array(session, int), np.array(age, float), nothing, nothing)
  return known, gold


def surface_cues(known: Known) -> np.ndarray:
  """13 cues of a turn that say nothing of its meaning: float32 [n, 13]."""
  starts = np.flatnonzero(np.diff(known.session, prepend=-1))
  place = np.arange(len(known.texts)) - np.repeat(starts, np.diff([*starts, len(known.texts)]))
  length = np.bincount(known.session)[known.session]
  return np.column_stack([[_cues(text) for text in known.texts], known.by_user, place, length]).astype(np.float32)


def _cues(text: str) -> list[float]:
  first = len(re.findall(r"\b(?:i|i'm|i've|i'd)\b", text, re.IGNORECASE))
  my = len(re.findall(r"\b(?:my|mine|me)\b", text, re.IGNORECASE))
  digits = len(re.findall(r"\d+", text))
  capitals = len(re.findall(r"(?<=[a-z,] )[A-Z]", text))
  size = len(text)
  amounts = [np.log1p(size), min(size, 1000) / 1000, *np.log1p([first, my, digits, capitals])]
  marks = [float("?" in text), float("!" in text), float("\n" in text), float("by the way" in text.lower())]
  return amounts + marks


def _fixed(cases: Cases, recency: list[np.ndarray], keep: float, repeats: int, seed: int) -> dict[str, np.ndarray]:
  """Policies that learn nothing: score of every case, [R, C]."""
  padded = np.zeros(cases.factors.shape[:2], np.float32)
  for row, values in zip(padded, recency, strict=True):
    row[: len(values)] = values
  drawn = np.random.default_rng([seed, 7]).random((repeats, *padded.shape), np.float32)
  policies = {"uniform": cases.factors[..., LIVE].sum(axis=-1), "recency": padded}
  policies |= {f"{FACTORS[i]} only": cases.factors[..., i] for i in LIVE}
  scores = {name: np.repeat(_score(cases, value, keep)[None], repeats, axis=0) for name, value in policies.items()}
  return scores | {"random": np.stack([_score(cases, one, keep) for one in drawn])}


def _surface(cases: Cases, cues: list[np.ndarray], halves: np.ndarray, keep: float) -> np.ndarray:
  """Logistic regression on the cues, fitted on each half: score of every case, [R, C]."""
  labels = [np.isin(np.arange(len(table)), places) for table, places in zip(cues, cases.gold, strict=True)]
  scores = []
  for half in halves:
    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=500))
    seen = np.flatnonzero(half)
    model.fit(np.concatenate([cues[i] for i in seen]), np.concatenate([labels[i] for i in seen]))
    values = np.zeros(cases.factors.shape[:2], np.float32)
    for row, table in zip(values, cues, strict=True):
      row[: len(table)] = model.decision_function(table)
    scores.append(_score(cases, values, keep))
  return np.stack(scores)


def _score(cases: Cases, values: np.ndarray, keep: float) -> np.ndarray:
  budget = budgets(cases.size, keep)
  return np.asarray(kept(*map(jnp.asarray, (values, cases.size, cases.gold, budget))))


def _summary(scores: np.ndarray, halves: np.ndarray) -> dict[str, dict[str, float]]:
  fitted = np.array([row[half].mean() for row, half in zip(scores, halves, strict=True)])
  unseen = np.array([row[~half].mean() for row, half in zip(scores, halves, strict=True)])
  return {"unseen": _mean_std(unseen), "fitted": _mean_std(fitted)}


def _mean_std(values: np.ndarray) -> dict[str, float]:
  return {"mean": float(values.mean()), "std": float(values.std())}


def _gap(learned: np.ndarray, other: np.ndarray, halves: np.ndarray, config: ConfigDict) -> Interval:
  """Learned minus other, paired by case: each case's score is its mean over the splits that did not fit on it."""
  unseen = ~halves
  scored = unseen.any(axis=0)
  mean = [(scores * unseen).sum(axis=0)[scored] / unseen.sum(axis=0)[scored] for scores in (learned, other)]
  samples, confidence = config.eval.bootstrap, config.eval.confidence
  return difference_interval(mean[0], mean[1], samples=samples, confidence=confidence, seed=config.seed)


def _print(rows: dict[str, dict[str, dict[str, float]]], gaps: dict[str, Interval]) -> None:
  print(f"{'policy':18}{'unseen cases':>16}{'fitted cases':>16}   learned minus it, unseen", flush=True)
  for name, row in sorted(rows.items(), key=lambda item: -item[1]["unseen"]["mean"]):
    cells = "".join(f"{row[half]['mean']:>9.3f} ±{row[half]['std']:.3f}" for half in ("unseen", "fitted"))
    print(f"{name:18}{cells}   {gaps.get(name, '')!s}", flush=True)


def _day(text: str) -> float | None:
  """Days of "2023/05/20 (Sat) 02:21" since the year 1, or None for another form."""
  match = re.fullmatch(r"\s*(\d{4})/(\d\d?)/(\d\d?)\b.*?(?:(\d\d?):(\d\d))?\s*", text)
  if match is None:
    return None
  try:
    day = datetime.date(int(match[1]), int(match[2]), int(match[3])).toordinal()
  except ValueError:
    return None
  return day + (int(match[4] or 0) + int(match[5] or 0) / 60) / 24


def _instances(path: str) -> Iterator[dict[str, Any]]:
  """The instances of a JSON list or of JSON lines, with or without xz."""
  file = pathlib.Path(os.path.expanduser(path))
  opener = lzma.open if file.suffix == ".xz" else open
  with opener(file, "rt", encoding="utf-8") as lines:
    try:
      if ".jsonl" in file.suffixes:
        yield from (json.loads(line) for line in lines if line.strip())
      else:
        yield from json.load(lines)
    except (json.JSONDecodeError, lzma.LZMAError) as error:
      raise ValueError(f"{path} is no LongMemEval file: {error}") from None
