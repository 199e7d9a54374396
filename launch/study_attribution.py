"""What attribution costs and how far it can be believed: scorers and estimators on questions about real conversations.

  python launch/study_attribution.py --data=locomo10.json --out=runs/attribution --questions=50     # collect, resumable
  python launch/study_attribution.py --out=runs/attribution --analyse                               # tables

Each question is asked about a memory of its evidence turns and of the turns that BM25 likes best beside them, some 150
tokens in all. Collected once per question and kept: the answer, its log-probability under many masks by every scorer,
and under masks that no estimator is fitted to (exact). All estimators are then compared on the same measurements.
"""

import json
import pathlib
import time
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from attrimem_jax.attribution import ablations, attribute
from attrimem_jax.data import locomo
from attrimem_jax.io import models
from attrimem_jax.memory.bank import Bank
from attrimem_jax.memory.context import answer_prefix
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

_TOKENS = 160  # of memory


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
  model = models.load(FLAGS.model)
  chat = Chat(model.tokenizer)
  reader = Reader(model, FULL, Bm25(top_k=60), max_context=4096, max_new_tokens=24)
  header = answer_prefix(chat, FULL)
  episodes, _ = locomo.read(FLAGS.data)
  folder.mkdir(parents=True, exist_ok=True)
  started, done = time.monotonic(), 0
  for number, (question, bank, gold) in enumerate(questions(episodes, chat, FLAGS.questions)):
    path = folder / f"{number:03d}.npz"
    if path.exists():
      continue
    ((answer,),) = ask(reader, [(bank, [question], None)], chat)
    measured = measure(model, header, answer, number)
    inside = _inside(answer, bank, gold)
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
      np.savez_compressed(file, **measured, evidence=inside, words=json.dumps([question.text, answer.text,
                          *question.answers]), length=len(answer.completion.ids))  # fmt: skip
    partial.rename(path)
    done += 1
    rate = (time.monotonic() - started) / done
    print(f"{number + 1}/{FLAGS.questions}  {rate:.0f} s a question  {question.text!r} -> {answer.text!r}", flush=True)


def measure(model, header, answer: Answer, number: int) -> dict[str, np.ndarray]:
  """Masks and log-probabilities; `…_seconds` are those of the call, compilation included where a shape is new."""
  problem = attribute.Problem(answer.prompt, answer.source, answer.context.sources, answer.completion.ids, (0, number))
  sources = len(problem.sources)
  most = max(FLAGS.exact, FLAGS.masked, FLAGS.cached)
  masks = ablations.draw(np.random.default_rng([0, number]), most, sources)
  held_out = ablations.draw(np.random.default_rng([1, number]), FLAGS.held_out, sources)
  measured = {"masks": masks, "held_out": held_out}
  for name, rows, scorer in (
    ("exact", masks[: FLAGS.exact], "exact"),
    ("masked", masks[: FLAGS.masked], "masked"),
    ("cached", masks[: FLAGS.cached], "cached"),
    ("judge", np.concatenate([held_out, np.ones((1, sources), bool)]), "exact"),
  ):
    start = time.monotonic()
    (measured[name],) = attribute.score(model, header, [problem], [rows], scorer=scorer)
    measured[f"{name}_seconds"] = np.array(time.monotonic() - start)
  return measured


def _inside(answer: Answer, bank: Bank, gold: set[int]) -> np.ndarray:
  """bool [S]: whether a source stands in a record of the evidence."""
  ranges = [(r.start, r.start + len(r.ids)) for r in bank.current() if r.id in gold]
  return np.array([any(a <= s.position < b for a, b in ranges) for s in answer.context.sources])


def main(argv) -> None:
  folder = pathlib.Path(FLAGS.out)
  if not FLAGS.analyse:
    collect(folder)


if __name__ == "__main__":
  app.run(main)
