"""What attribution costs and how far it can be believed: scorers and estimators on questions about real conversations.

  python launch/study_attribution.py --data=locomo10.json --out=runs/attribution --questions=50     # collect, resumable
  python launch/study_attribution.py --out=runs/attribution --analyse                               # tables
  python launch/study_attribution.py --out=runs/attribution --analyse --drops                       # and top-k drops

Each question is asked about a memory of its evidence turns and of the turns that BM25 likes best beside them, some 150
tokens in all. Collected once per question and kept: the answer, its log-probability under many masks by every scorer,
and under masks that no estimator is fitted to (exact). All estimators are then compared on the same measurements.
"""

import json
import pathlib
import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import app, flags

from attrimem_jax.attribution import ablations, attribute, lasso
from attrimem_jax.attribution.faithfulness import lds, without_top
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
_LEVELS = (0.0625, 0.125, 0.25, 0.5, 1.0)  # of all gates, at which gradients are taken


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
    case |= {"held_out": held_out, "masks": masks}
    for scorer in ("exact", "cached"):  # what the first M masks cost, for every M
      none, one = (attribute.tokens_read(header, problem, masks[:m], scorer) for m in (0, 1))
      each = np.array([attribute.tokens_read(header, problem, row[None], scorer) - none for row in masks])
      case[f"{scorer}_tokens"] = none + np.cumsum(each)
      assert case[f"{scorer}_tokens"][0] == one
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
    self.exact, self.masked, self.cached = (target(self.data[name]) for name in ("exact", "masked", "cached"))
    self.held_out, self.judge = self.data["held_out"], target(self.data["judge"][:-1])
    self.length = len(self.data["answer"])

  def affordable(self, masks: int) -> int:
    """How many cached masks cost what `masks` exact ones do, in tokens read."""
    fits = int(np.searchsorted(self.data["cached_tokens"], self.data["exact_tokens"][masks - 1], side="right"))
    return min(fits, len(self.cached))


Linear = tuple[np.ndarray, float]  # weights and intercept


def by_lasso(penalty: str, alpha: float, problems: list[lasso.Problem]) -> list[Linear]:
  fits = lasso.fit(problems, penalty=lasso.Penalty(penalty), alpha=alpha)
  return [(fit.weights.astype(np.float64), fit.intercept) for fit in fits]


def by_ridge(problem: lasso.Problem) -> Linear:
  """Ridge regression with the penalty of least leave-one-out error (closed form), in float64."""
  x, y = problem.x.astype(np.float64), problem.y.astype(np.float64)
  mean, level = x.mean(0), y.mean()
  gram = (x - mean) @ (x - mean).T
  best, chosen = np.inf, np.zeros(len(y))
  for penalty in np.geomspace(1e-2, 1e3, 16) * np.trace(gram) / len(y):
    inverse = np.linalg.inv(gram + penalty * np.eye(len(y)))
    hat = gram @ inverse + 1 / len(y)
    error = np.mean(((y - level - gram @ inverse @ (y - level)) / (1 - np.diag(hat))) ** 2)
    if error < best:
      best, chosen = error, inverse @ (y - level)
  weights = (x - mean).T @ chosen
  return weights, float(level - mean @ weights)


def corrected(case: Case, exact: int, cached: int) -> lasso.Problem:
  """Cached targets on the scale of the exact ones (a line through the masks that have both), exact ones where known."""
  slope, level = np.polyfit(case.cached[:exact], case.exact[:exact], 1)
  y = np.concatenate([case.exact[:exact], level + max(slope, 0.0) * case.cached[exact:cached]])
  return lasso.Problem(case.masks[:cached], y, case.length)


def analyse(folder: pathlib.Path) -> None:
  cases = [Case(path) for path in sorted(folder.glob("[0-9]*.npz"))]
  estimates: dict[str, list[Linear]] = {}

  def problems(scorer: str, count) -> list[lasso.Problem]:
    counts = [count(case) if callable(count) else count for case in cases]
    return [lasso.Problem(c.masks[:m], getattr(c, scorer)[:m], c.length) for c, m in zip(cases, counts, strict=True)]

  for count in (8, 16, 32, 64):
    estimates[f"exact {count}, raw 0.01"] = by_lasso("raw", 0.01, problems("exact", count))
  for count in (32, 64):
    estimates[f"exact {count}, held-out"] = by_lasso("held_out", 0.01, problems("exact", count))
    estimates[f"exact {count}, ridge"] = [by_ridge(p) for p in problems("exact", count)]
  estimates["masked 16, raw 0.01"] = by_lasso("raw", 0.01, problems("masked", 16))
  equal = {"at the cost of 32 exact": lambda case: case.affordable(32)}
  for name, count in {**{str(m): m for m in (32, 64, 128, 256)}, **equal}.items():
    estimates[f"cached {name}, raw 0.01"] = by_lasso("raw", 0.01, problems("cached", count))
    estimates[f"cached {name}, held-out"] = by_lasso("held_out", 0.01, problems("cached", count))
    estimates[f"cached {name}, ridge"] = [by_ridge(p) for p in problems("cached", count)]
  for exact in (8, 16):  # the rest of the cost of 32 exact masks in cached ones
    mixed = [corrected(case, exact, max(case.affordable(32 - exact), exact)) for case in cases]
    estimates[f"exact {exact} + cached, at the cost of 32 exact, held-out"] = by_lasso("held_out", 0.01, mixed)
    estimates[f"exact {exact} + cached, at the cost of 32 exact, ridge"] = [by_ridge(p) for p in mixed]
  _report(folder, cases, estimates)


def without_strongest(cases: list[Case], estimates: dict[str, list[Linear]]) -> dict[str, np.ndarray]:
  """Nats that each answer loses without the `_TOP` strongest tokens of an estimator, by the exact scorer."""
  model = models.load(FLAGS.model)
  header = answer_prefix(Chat(model.tokenizer), FULL)
  problems = [_problem(case.data) for case in cases]
  rows = [np.concatenate([without_top(fits[i][0], (_TOP,)) for fits in estimates.values()]) for i in range(len(cases))]
  scores = np.stack(attribute.score(model, header, problems, rows, step=_STEP))
  whole = np.array([case.data["judge"][-1] for case in cases])
  return {name: whole - scores[:, i] for i, name in enumerate(estimates)}


def _report(folder: pathlib.Path, cases: list[Case], estimates: dict[str, list[Linear]]) -> None:
  scores = {
    name: np.array([lds(b + c.held_out @ w, c.judge) for c, (w, b) in zip(cases, fits, strict=True)])
    for name, fits in estimates.items()
  }
  found = {
    name: np.array(
      [np.mean(c.evidence[np.argsort(-w, kind="stable")[:5]]) for c, (w, _) in zip(cases, fits, strict=True)]
    )
    for name, fits in estimates.items()
  }
  published = scores["exact 32, raw 0.01"]
  sources = [case.masks.shape[1] for case in cases]
  print(f"{len(cases)} questions, {np.mean(sources):.0f} sources each; evidence holds "
        f"{np.mean([c.evidence.mean() for c in cases]):.2f} of them")  # fmt: skip
  drops = without_strongest(cases, estimates) if FLAGS.drops else {}
  print(f"| estimator | LDS | less that of exact 32, raw 0.01 | top 5 in evidence | nats lost without the top {_TOP} |")
  print("|---|---|---|---|---|")
  rows = []
  for name, values in scores.items():
    whole, gain = mean_interval(values), difference_interval(values, published)
    row = {"estimator": name, "lds": vars(whole), "gain": vars(gain), "evidence": float(found[name].mean())}
    lost = mean_interval(drops[name]) if drops else None
    rows.append(row | ({"drop": vars(lost)} if lost else {}))
    print(f"| {name} | {whole} | {gain} | {found[name].mean():.2f} | {lost or ''} |")
  bias = [np.corrcoef(c.exact, c.cached[: len(c.exact)])[0, 1] for c in cases]
  in_place = [np.corrcoef(c.exact[: len(c.masked)], c.masked)[0, 1] for c in cases]
  print(f"correlation of targets with exact ones: cached {np.mean(bias):.2f}, masked {np.mean(in_place):.2f}")
  for name in ("exact", "masked", "cached"):
    each = [float(c.data[f"{name}_seconds"]) for c in cases]
    print(f"{name}: {np.median(each):.3f} s a mask")
  print(f"cached masks for the tokens of 32 exact ones: {np.mean([c.affordable(32) for c in cases]):.0f}")
  (folder / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def main(argv) -> None:
  jax.config.update("jax_compilation_cache_dir", str(models.cache() / "compiled"))
  folder = pathlib.Path(FLAGS.out)
  if FLAGS.analyse:
    analyse(folder)
  else:
    collect(folder)


if __name__ == "__main__":
  app.run(main)
