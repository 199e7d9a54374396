"""What attribution costs and how far it can be believed: scorers and estimators on questions about real conversations.

  python launch/study_attribution.py --data=locomo10.json --out=runs/attribution --questions=50     # collect, resumable
  python launch/study_attribution.py --out=runs/attribution --analyse                               # tables
  python launch/study_attribution.py --out=runs/attribution --analyse --drops                       # and top-k drops

Each question is asked about a memory of its evidence turns and of the turns that BM25 likes best beside them, some 150
tokens in all. Collected once per question and kept: the answer, its log-probability under many masks by every scorer,
and under masks that no estimator is fitted to (exact). All estimators are then compared on the same measurements.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import app, flags

from attrimem_jax.attribution import ablations, attribute, lasso
from attrimem_jax.attribution.ablations import LEVELS
from attrimem_jax.attribution.faithfulness import lds, r2, without_top
from attrimem_jax.attribution.scoring import target
from attrimem_jax.data import locomo
from attrimem_jax.evaluation.bootstrap import difference_interval, mean_interval
from attrimem_jax.io import models
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import Source, answer_prefix
from attrimem_jax.memory.prompts import FULL
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.rollout.answering import Answer, Reader, ask
from attrimem_jax.text.chat import Chat
from attrimem_jax.types import CallKey, Episode, Module, Question, Record

FLAGS = flags.FLAGS
flags.DEFINE_string("data", "", "LoCoMo file.")
flags.DEFINE_string("out", "runs/attribution", "Folder of the measurements.")
flags.DEFINE_string("model", "smollm2-135m-instruct", "The answer model.")
flags.DEFINE_integer("questions", 50, "How many.")
flags.DEFINE_integer("exact", 64, "Masks by the exact scorer.")
flags.DEFINE_integer("masked", 16, "Masks by the masked scorer.")
flags.DEFINE_integer("cached", 256, "Masks by the cached scorer.")
flags.DEFINE_integer("held_out", 32, "Masks to judge by.")
flags.DEFINE_boolean("analyse", False, "Print the tables instead of measuring.")
flags.DEFINE_boolean("drops", False, "Score the answers without the strongest tokens of every estimator too.")

_TOKENS = 160  # of memory
_STEP = 64  # lengths are padded to multiples of it: question after question then needs few programs
_TOP = 4
_LEVELS = tuple(sorted(LEVELS))


def questions(episodes: tuple[Episode, ...], chat: Chat, count: int) -> Iterator[tuple[Question, Bank, set[int]]]:
  """Single-hop questions, their memories and the ids of the records that hold the evidence, spread over histories."""
  rng = np.random.default_rng(0)
  queues = [
    (e, [q for q in e.questions if q.kind == "single-hop" and len(q.evidence) == 1 and not q.abstain]) for e in episodes
  ]
  order = [[(e, qs[i]) for i in rng.permutation(len(qs))] for e, qs in queues]
  found = 0
  for number in range(max(map(len, order))):
    for queue in order:
      if number < len(queue) and found < count and (memory := _memory(chat, *queue[number])):
        found += 1
        yield queue[number][1], *memory


def _memory(chat: Chat, episode: Episode, question: Question) -> tuple[Bank, set[int]] | None:
  """Evidence first, then other turns as long as they fit; in time order, each token owned by one pretended call."""
  turns = [(turn, session.date) for session in episode.history.sessions for turn in session.turns]
  owner = CallKey(episode.history.id, 0, 0, Module.SEMANTIC)
  records, at = [], 0
  for number, (turn, date) in enumerate(turns):
    ids = tuple(chat.tokenizer.encode(f" {turn.speaker}: {' '.join(turn.text.split())}"))
    records.append(Record(number + 1, Module.SEMANTIC, turn.text, ids, date, owner, at))
    at += len(ids)
  gold = [r for r, (turn, _) in zip(records, turns, strict=True) if turn.id in question.evidence]
  if len(gold) != 1 or not 8 <= len(gold[0].ids) <= _TOKENS // 2:
    return None
  ranked = Bm25(top_k=60).rank(question.text, records)
  chosen, room = [*gold], _TOKENS - len(gold[0].ids)
  for i in ranked:
    if records[i] not in chosen and 8 <= len(records[i].ids) <= min(room, _TOKENS // 3):
      chosen.append(records[i])
      room -= len(records[i].ids)
  if room > 40:
    return None
  chosen.sort(key=lambda record: record.id)
  return Bank(tuple(chosen), at), {gold[0].id}


def collect(folder: pathlib.Path) -> None:
  """Measures what is asked for and not there yet, question by question."""
  model = models.load(FLAGS.model)
  chat = Chat(model.tokenizer)
  reader = Reader(model, FULL, Bm25(top_k=60), max_context=4096, max_new_tokens=24, step=_STEP)
  header = answer_prefix(chat, FULL)
  episodes, _ = locomo.read(FLAGS.data)
  folder.mkdir(parents=True, exist_ok=True)
  started, done = time.monotonic(), 0
  for number, (question, bank, gold) in enumerate(questions(episodes, chat, FLAGS.questions)):
    path = folder / f"{number:03d}.npz"
    case = dict(np.load(path, allow_pickle=False)) if path.exists() else _asked(reader, chat, question, bank, gold)
    if not measure(model, header, case, number):
      continue
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
      np.savez_compressed(file, **case)
    partial.rename(path)
    done += 1
    rate = (time.monotonic() - started) / done
    print(f"{number + 1}/{FLAGS.questions}  {rate:.0f} s a question  {case['words']}", flush=True)


def _asked(reader: Reader, chat: Chat, question: Question, bank: Bank, gold: set[int]) -> dict[str, np.ndarray]:
  ((answer,),) = ask(reader, [(bank, [question], None)], chat)
  return {
    "prompt": answer.prompt,
    "source": answer.source,
    "answer": answer.completion.ids,
    "evidence": _inside(answer, bank, gold),
    "words": np.array(json.dumps([question.text, answer.text, *question.answers])),
  }


def _problem(case: dict[str, np.ndarray], number: int = 0) -> attribute.Problem:
  owner = CallKey("", 0, 0, Module.SEMANTIC)
  sources = tuple(Source(owner, i) for i in range(len(case["evidence"])))
  return attribute.Problem(case["prompt"], case["source"], sources, case["answer"], (0, number))


def measure(model, header, case: dict[str, np.ndarray], number: int) -> bool:
  """Adds the log-probabilities that `case` lacks, and whether it lacked any.

  `…_seconds` is a mask's share of its call, compilation included where a shape is new.
  """
  problem = _problem(case, number)
  sources = len(problem.sources)
  held_out = ablations.draw(np.random.default_rng([1, number]), FLAGS.held_out, sources)
  asked = {"exact": FLAGS.exact, "masked": FLAGS.masked, "cached": FLAGS.cached, "judge": FLAGS.held_out + 1}
  most = max(*asked.values(), *(len(case[name]) for name in asked if name in case))
  masks = ablations.draw(np.random.default_rng([0, number]), most, sources)
  lacking = False
  for name, count in asked.items():
    known = case.get(name, np.zeros(0, np.float32))
    if len(known) >= count:
      continue
    rows = masks[:count]
    if name == "judge":  # its last row removes nothing
      rows, known = np.concatenate([held_out, np.ones((1, sources), bool)]), known[:0]
    lacking, start, scorer = True, time.monotonic(), "exact" if name == "judge" else name
    (found,) = attribute.score(model, header, [problem], [rows[len(known) :]], scorer=scorer, step=_STEP)
    case[name] = np.concatenate([known, found])
    case[f"{name}_seconds"] = np.array((time.monotonic() - start) / len(found))
  gates = np.repeat(np.array(_LEVELS)[:, None], sources, axis=1)
  for scorer in ("masked", "cached"):
    if len(case.get(f"{scorer}_slopes", ())) == len(gates):
      continue
    lacking, start = True, time.monotonic()
    (logp,), (found,) = attribute.slopes(model, header, [problem], [gates], scorer=scorer, step=_STEP)
    case |= {f"{scorer}_gated": logp, f"{scorer}_slopes": found}
    case[f"{scorer}_slopes_seconds"] = np.array((time.monotonic() - start) / len(gates))
  if lacking:
    case |= {"held_out": held_out, "masks": masks, "header": np.array(header)}
  return lacking


def _inside(answer: Answer, bank: Bank, gold: set[int]) -> np.ndarray:
  """bool [S]: whether a source stands in a record of the evidence."""
  ranges = [(r.start, r.start + len(r.ids)) for r in bank.current() if r.id in gold]
  return np.array([any(a <= s.position < b for a, b in ranges) for s in answer.context.sources])


class Case:
  """The measurements of one question; targets are logits."""

  def __init__(self, path: pathlib.Path):
    self.data = dict(np.load(path, allow_pickle=False))
    self.masks, self.evidence = self.data["masks"], self.data["evidence"]
    self.targets = {name: target(self.data[name]) for name in ("exact", "masked", "cached")}
    self.held_out, self.judge = self.data["held_out"], target(self.data["judge"][:-1])
    self.problem = _problem(self.data)
    self.header = self.data["header"]
    self.price = self.cost("exact", 32)

  def cost(self, scorer: str, count: int) -> int:
    """Tokens read for the first `count` masks."""
    return attribute.tokens_read(self.header, self.problem, self.masks[:count], scorer)

  def affordable(self, exact: int) -> int:
    """How many cached masks cost what `exact` exact ones do, in tokens read."""
    most = self.cost("exact", exact)
    return max(m for m in range(1, len(self.targets["cached"]) + 1) if self.cost("cached", m) <= most)

  def regression(self, scorer: str, count: int) -> lasso.Problem:
    return lasso.Problem(self.masks[:count], self.targets[scorer][:count], len(self.problem.answer))

  def by_gradients(self, scorer: str, count: int, masks: int) -> attribute.Measurement:
    """The measurement of some gradients, with so many exact masks for their scale."""
    rows = [_LEVELS.index(level) for level in LEVELS[:count]]
    logp, slopes = self.data[f"{scorer}_gated"][rows], self.data[f"{scorer}_slopes"][rows]
    gradients = attribute.Gradients(np.array(LEVELS[:count]), logp, slopes)
    return attribute.Measurement(self.problem, self.masks[:masks], self.data["exact"][:masks], gradients)


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
  """What an estimator says of one case, and the tokens that its measurements read.

  Attributes:
    weights: float64 [S].
    predicted: float64 [held-out masks], the targets under them.
    tokens: read.
  """

  weights: np.ndarray
  predicted: np.ndarray
  tokens: int


def by_lasso(cases: list[Case], scorer: str, counts: list[int], penalty: str = "raw") -> list[Estimate]:
  problems = [case.regression(scorer, count) for case, count in zip(cases, counts, strict=True)]
  fits = lasso.fit(problems, penalty=lasso.Penalty(penalty), alpha=0.01)
  return [
    Estimate(f.weights.astype(np.float64), f.intercept + c.held_out @ f.weights, c.cost(scorer, m))
    for c, f, m in zip(cases, fits, counts, strict=True)
  ]


def by_gradients(cases: list[Case], scorer: str, count: int, masks: int = 0) -> list[Estimate]:
  found = attribute.fit([case.by_gradients(scorer, count, masks) for case in cases])
  return [
    Estimate(f.weights.astype(np.float64), f.predict(c.held_out), attribute.price(c.header, f.measured, scorer))
    for c, f in zip(cases, found, strict=True)
  ]


def by_gradients_and_rest(cases: list[Case], count: int, exact: int) -> list[Estimate]:
  """Gradients, scaled to some exact masks, and a LASSO on what they leave of these."""
  starts, rests = by_gradients(cases, "masked", count), []
  for case, start in zip(cases, starts, strict=True):
    problem = case.regression("exact", exact)
    guess = problem.x @ start.weights
    slope = max(np.polyfit(guess, problem.y, 1)[0], 0.0)
    rests.append((slope, dataclasses.replace(problem, y=problem.y - slope * guess)))
  fits = lasso.fit([problem for _, problem in rests], penalty=lasso.Penalty.HELD_OUT)
  estimates = []
  for case, start, (slope, _), rest in zip(cases, starts, rests, fits, strict=True):
    weights = slope * start.weights + rest.weights
    estimates.append(Estimate(weights, case.held_out @ weights, start.tokens + case.cost("exact", exact)))
  return estimates


def by_exact_and_cached(cases: list[Case], exact: int) -> list[Estimate]:
  """Exact masks, and for the rest of the price of 32 cached ones on the scale of these (a line through both)."""
  problems, tokens = [], []
  for case in cases:
    count = max(case.affordable(32 - exact), exact)
    slope, level = np.polyfit(case.targets["cached"][:exact], case.targets["exact"][:exact], 1)
    y = level + max(slope, 0.0) * case.targets["cached"][:count]
    y[:exact] = case.targets["exact"][:exact]
    problems.append(lasso.Problem(case.masks[:count], y, len(case.problem.answer)))
    tokens.append(case.cost("exact", exact) + case.cost("cached", count))
  fits = lasso.fit(problems, penalty=lasso.Penalty.HELD_OUT)
  return [
    Estimate(f.weights.astype(np.float64), f.intercept + c.held_out @ f.weights, t)
    for c, f, t in zip(cases, fits, tokens, strict=True)
  ]


def by_pairs(cases: list[Case], count: int, strongest: int = 6) -> list[Estimate]:
  """A LASSO with products of its strongest sources as columns too; one counts half for either of its sources."""
  firsts = by_lasso(cases, "cached", [count] * len(cases), "held_out")
  pairs = []
  for first in firsts:
    order = np.argsort(-np.abs(first.weights), kind="stable")[:strongest]
    pairs.append(np.array(list(itertools.combinations(order, 2))))

  def joined(masks, pair):
    return np.concatenate([masks, masks[:, pair].all(2)], axis=1)

  problems = [
    lasso.Problem(joined(c.masks[:count], p), c.targets["cached"][:count], len(c.problem.answer))
    for c, p in zip(cases, pairs, strict=True)
  ]
  estimates = []
  for case, pair, fit in zip(cases, pairs, lasso.fit(problems, penalty=lasso.Penalty.HELD_OUT), strict=True):
    sources = case.masks.shape[1]
    weights = fit.weights[:sources].astype(np.float64)
    np.add.at(weights, pair, fit.weights[sources:, None] / 2)
    predicted = fit.intercept + joined(case.held_out, pair) @ fit.weights
    estimates.append(Estimate(weights, predicted, case.cost("cached", count)))
  return estimates


def analyse(folder: pathlib.Path) -> None:
  """Compares estimators on the cases that have as many measurements as the flags ask for."""
  needed = {"exact": FLAGS.exact, "masked": FLAGS.masked, "cached": FLAGS.cached}
  cases = [Case(path) for path in sorted(folder.glob("[0-9]*.npz"))]
  cases = [case for case in cases if all(len(case.targets[name]) >= count for name, count in needed.items())]
  estimates: dict[str, list[Estimate]] = {}
  for scorer, most in needed.items():
    for count in (8, 16, 32, 64, 128, 256, 512):
      if count <= most:
        estimates[f"{count} {scorer} masks"] = by_lasso(cases, scorer, [count] * len(cases))
  equal = [case.affordable(32) for case in cases]
  estimates["cached masks at the cost of 32 exact"] = by_lasso(cases, "cached", equal)
  estimates["the same, held-out penalty"] = by_lasso(cases, "cached", equal, "held_out")
  estimates["the same, pairs of the strongest 6"] = by_pairs(cases, min(equal))
  estimates["8 exact and cached masks at that cost"] = by_exact_and_cached(cases, 8)
  for scorer in ("masked", "cached"):
    for count in range(1, len(LEVELS) + 1):
      estimates[f"{count} {scorer} gradient{'s' if count > 1 else ''}"] = by_gradients(cases, scorer, count)
  estimates["5 masked gradients, 8 exact masks for scale"] = by_gradients(cases, "masked", 5, 8)
  estimates["3 masked gradients, LASSO of 8 exact masks on the rest"] = by_gradients_and_rest(cases, 3, 8)
  _report(folder, cases, estimates)


def without_strongest(cases: list[Case], estimates: dict[str, list[Estimate]]) -> dict[str, np.ndarray]:
  """Nats that each answer loses without the `_TOP` strongest tokens of an estimator, by the exact scorer."""
  model = models.load(FLAGS.model)
  header = answer_prefix(Chat(model.tokenizer), FULL)
  problems = [case.problem for case in cases]
  rows = [
    np.concatenate([without_top(each[i].weights, (_TOP,)) for each in estimates.values()]) for i in range(len(cases))
  ]
  scores = np.stack(attribute.score(model, header, problems, rows, step=_STEP))
  whole = np.array([case.data["judge"][-1] for case in cases])
  return {name: whole - scores[:, i] for i, name in enumerate(estimates)}


def _report(folder: pathlib.Path, cases: list[Case], estimates: dict[str, list[Estimate]]) -> None:
  sources, share = [case.masks.shape[1] for case in cases], np.mean([case.evidence.mean() for case in cases])
  print(f"{len(cases)} questions, {np.mean(sources):.0f} sources each; evidence holds {share:.2f} of them")
  drops = without_strongest(cases, estimates) if FLAGS.drops else {}
  columns = ("estimator", "cost in 32 exact masks", "LDS", "less that of 32 exact masks", "R²", "evidence in top 5")
  print(_row(*columns, f"nats lost without the top {_TOP}"))
  print(_row(*["---"] * 7))
  rows, published = [], np.zeros(0)
  for name, each in estimates.items():
    values = np.array([lds(e.predicted, c.judge) for c, e in zip(cases, each, strict=True)])
    if name == "32 exact masks":
      published = values
    evidence = [
      np.mean(c.evidence[np.argsort(-e.weights, kind="stable")[:5]]) for c, e in zip(cases, each, strict=True)
    ]
    row = {"estimator": name, "evidence": float(np.mean(evidence)), "lds": vars(mean_interval(values))}
    row["cost"] = float(np.mean([e.tokens / c.price for c, e in zip(cases, each, strict=True)]))
    gain = difference_interval(values, published) if len(published) else None
    row |= {"gain": vars(gain)} if gain else {}
    lost = mean_interval(drops[name]) if drops else None
    row |= {"drop": vars(lost)} if lost else {}
    row["r2"] = float(np.median([r2(e.predicted, c.judge) for c, e in zip(cases, each, strict=True)]))
    rows.append(row)
    shown = (f"{row['r2']:.2f}", f"{row['evidence']:.2f}", lost or "")
    print(_row(name, f"{row['cost']:.2f}", mean_interval(values), gain or "", *shown))
  print("rank correlation of targets with exact ones: " + ", ".join(
    f"{name} {np.mean([_agreement(case, name) for case in cases]):.2f}" for name in ("masked", "cached")))  # fmt: skip
  for name in ("exact", "masked", "cached", "masked_slopes", "cached_slopes"):
    print(f"{name}: {np.median([float(c.data[f'{name}_seconds']) for c in cases]):.2f} s each")
  (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def _row(*cells) -> str:
  return f"| {' | '.join(map(str, cells))} |"


def _agreement(case: Case, scorer: str) -> float:
  both = min(len(case.targets["exact"]), len(case.targets[scorer]))
  return lds(case.targets["exact"][:both], case.targets[scorer][:both])


def main(argv) -> None:
  jax.config.update("jax_compilation_cache_dir", str(models.cache() / "compiled"))
  folder = pathlib.Path(FLAGS.out)
  if FLAGS.analyse:
    analyse(folder)
  else:
    collect(folder)


if __name__ == "__main__":
  app.run(main)
