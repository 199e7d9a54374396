"""One memory system with one answer model over a benchmark, job `benchmark`: conversation by conversation, resumable.

Each conversation leaves one file with its memories, answers and costs, whole or not at all; the same command again goes
on with those that are missing. When all are there, the answers are scored over the whole data set: `results.json`, the
report, and the submission in the benchmark's own format.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from attrimem_jax import validation
from attrimem_jax.data import benchmarks, synthetic
from attrimem_jax.evaluation import judging, submissions
from attrimem_jax.evaluation.asking import AnswerModel, Decoder, Remote
from attrimem_jax.evaluation.results import Conversation, read_conversation, rows_of, summarise
from attrimem_jax.io.clock import Clock
from attrimem_jax.io.metrics import write_json
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run
from attrimem_jax.jobs.tasks import of_kinds
from attrimem_jax.memory.prompts import Overflow
from attrimem_jax.systems import texts
from attrimem_jax.systems.policy import Policy
from attrimem_jax.systems.protocol import Passage, System, blinded
from attrimem_jax.types import Episode
from attrimem_jax.view.benchmark import write_page


def run_benchmark(config: ConfigDict, run: Run) -> None:
  """Writes conversations/*.json, results.json, report.html and submission.json(l) below the run directory.

  With `eval.judge` a model judges the answers too; without a verdict an answer is in no mean of its measure.
  """
  numbered, report = episodes(config)
  print(report, flush=True)
  every = [episode for _, episode in numbered]
  if config.eval.answers:
    conversations: list[Conversation] = []
    subject: dict[str, Any] = {"system": "given answers", "answer_model": config.eval.answers}
    answers = submissions.read(config.eval.answers, config.data.name, every)
    run.keep_config()
  else:
    conversations, subject = _ask_all(config, run, numbered)
    if run.stopping:
      return
    answers = {a.id: a.answer for c in conversations for a in c.answers if a.answer is not None}
  content = summarise(
    every, answers, conversations, config.data.name, samples=config.eval.bootstrap, confidence=config.eval.confidence
  )
  content = subject | {"benchmark": config.data.name, "top_k": config.answer.retriever.top_k} | content
  prices = config.answer.endpoint.prices
  if config.answer.endpoint.url and prices and conversations:
    cost = content["cost"]
    cost["answer_money"] = (cost["answer_read"] * prices[0] + cost["answer_written"] * prices[1]) / 1e6
  if config.eval.judge.url:
    content["measures"]["judge"], content["judge"] = _judged(config, run, every, answers)
  write_json(run.workdir / "results.json", content | {"config": config.to_dict()})
  name = f"{subject['system']}_{pathlib.PurePath(str(subject['answer_model'])).name}"
  path = submissions.write(run.workdir, config.data.name, config.data.path, every, answers, name)
  print(f"results: {run.workdir / 'results.json'}\nsubmission: {path}", flush=True)
  print(f"report: {write_page(run.workdir)}", flush=True)


def episodes(config: ConfigDict) -> tuple[list[tuple[int, Episode]], str]:
  """The first `eval.episodes` conversations of a split, in an order drawn from the seed, each with its number in it.

  A greater `eval.episodes` adds conversations and keeps those that were there.
  """
  reader = benchmarks.READERS.get(config.data.name)
  if reader is None:
    world = setup.world(config)
    made = [synthetic.episode(world, config.eval.split, config.data.seed, i) for i in range(config.eval.episodes)]
    every, report = tuple(made), f"synthetic world, {len(made)} conversations"
  else:
    every, found = reader.read(config.data.path)
    report, split = found.text(), config.eval.split
    table = benchmarks.read_splits(config.data.splits) if config.data.splits else None
    every = benchmarks.named(every, table, split) if table else benchmarks.holdout(every, split, config.data.holdout)
  asked = [dataclasses.replace(e, questions=tuple(of_kinds(e.questions, config.data.kinds))) for e in every]
  some = [(number, episode) for number, episode in enumerate(asked) if episode.questions]
  if not some:
    raise ValueError("config.data.kinds leaves no question: name other kinds, or use ()")
  order = np.random.default_rng(np.random.SeedSequence([config.seed, 4])).permutation(len(some))
  return [some[i] for i in sorted(order[: config.eval.episodes])], report


def _judged(
  config: ConfigDict, run: Run, every: Sequence[Episode], answers: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The judge's measure, and what there is to say of the judge: how far to trust it, what it left open and took."""
  settings, options = config.eval.judge, {"samples": config.eval.bootstrap, "confidence": config.eval.confidence}
  questions = [question for episode in every for question in episode.questions]
  with setup.client(settings, run, "judge") as client:
    rows = judging.calibration_set(questions, settings.calibration, config.seed)
    calibration = judging.calibrate(client.texts, rows, settings.tries)
    print(f"judge {settings.model}: recall {calibration.recall:.3f} on {calibration.right} right answers, specificity "
          f"{calibration.specificity:.3f} on {calibration.wrong} wrong ones", flush=True)  # fmt: skip
    found = judging.judged(every, answers, client.texts, tries=settings.tries, **options)
    spent = client.spent
  about = {
    "model": settings.model,
    "unjudged": list(found.unjudged),
    "comparable": found.comparable,
    "calibration": dataclasses.asdict(calibration),
    "spent": dataclasses.asdict(spent),
  }
  return rows_of(found.score, **options), about


def _ask_all(
  config: ConfigDict, run: Run, numbered: Sequence[tuple[int, Episode]]
) -> tuple[list[Conversation], dict[str, Any]]:
  folder, done = run.workdir / "conversations", []
  with contextlib.ExitStack() as closing, run.progress(0, len(numbered), "conversation") as progress:
    system, model = _parts(config, run, closing)
    run.keep_config()
    for count, (number, episode) in enumerate(numbered, 1):
      path = folder / f"{number:05d}.json"
      if not path.exists():
        if run.stopping:
          break
        write_json(path, _asked(system, model, number, episode, config))
      done.append(read_conversation(path, episode, fingerprint(episode)))
      progress.show(count, {})
  subject = {"system": system.name if system else done[0].system, "answer_model": model.name}
  return done, subject


def _asked(
  system: System | None, model: AnswerModel, number: int, episode: Episode, config: ConfigDict
) -> dict[str, Any]:
  """What one conversation leaves: memories (each passage once), answers, and what all of it cost."""
  clock = Clock()
  if system is None:
    source = pathlib.Path(config.eval.memories).expanduser() / "conversations" / f"{number:05d}.json"
    given = read_conversation(source, episode, fingerprint(episode))
    retrieved, cost, name, whole = given.retrieved(), dataclasses.asdict(given.cost), given.system, given.whole
    seconds = {"write": given.seconds["write"], "retrieve": given.seconds["retrieve"]}
  else:
    with clock("write"):
      memory = system.write(episode.history, number)
    with clock("retrieve"):
      retrieved = memory.retrieve([blinded(q, system.sees_evidence) for q in episode.questions])
    cost, name, whole = dataclasses.asdict(memory.cost), system.name, system.whole
    seconds = {phase: clock.times[f"time/{phase}"] for phase in ("write", "retrieve")}
  with clock("answer"):
    replies = model.answer(episode.questions, retrieved, whole)
  pool: dict[Passage, int] = {}
  ranks = [[pool.setdefault(passage, len(pool)) for passage in passages] for passages in retrieved]
  same = ranks[:1] if all(rank == ranks[0] for rank in ranks) else ranks  # the same for all questions: kept once
  return {
    "history": episode.history.id,
    "fingerprint": fingerprint(episode),
    "system": name,
    "whole": whole,
    "answer_model": model.name,
    "cost": cost,
    "seconds": seconds | {"answer": clock.times["time/answer"]},
    "passages": [[p.text, p.date, p.place] for p in pool],
    "retrieved": same,
    "answers": [
      {
        "id": question.id,
        "kind": question.kind,
        "question": question.text,
        "gold": list(question.answers),
        "answer": reply.text,
        "read": reply.read,
        "written": reply.written,
        "shown": list(reply.shown) if len(same) > 1 else len(reply.shown),
        "left_out": reply.left_out,
      }
      for question, reply in zip(episode.questions, replies, strict=True)
    ],
  }


def fingerprint(episode: Episode) -> str:
  """Tells a conversation from another one, or from an earlier version of it, under the same number."""
  text = json.dumps([dataclasses.asdict(episode.history), [dataclasses.asdict(q) for q in episode.questions]])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parts(config: ConfigDict, run: Run, closing: contextlib.ExitStack) -> tuple[System | None, AnswerModel]:
  """The system (None: memories of another run) and the answer model; `closing` closes what they hold open."""
  policy = setup.policy_model(config, run) if config.eval.system == "policy" and not config.eval.memories else None
  answer = setup.answer_model(config, policy)
  elsewhere = config.answer.endpoint.url
  validation.validate_lengths(config, (policy or answer).config, None if elsewhere else answer.config)
  reader = dataclasses.replace(setup.reader(config, answer, policy or answer), writer=None)
  decoder = Decoder(reader, setup.chat(config, answer.tokenizer), config.eval.window)
  model: AnswerModel = decoder
  if elsewhere:
    client = closing.enter_context(setup.client(config.answer.endpoint, run, "answers"))
    model = Remote(client.model, client.complete, decoder)
  if config.eval.memories:
    return None, model
  if policy is not None:
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
    writer = setup.writer(config, policy, config.eval.temperature)
    return Policy(writer, reader.retriever, config.policy.max_prompt // 2, Overflow(config.policy.overlong), key), model
  systems: dict[str, System] = {
    "rag_session": texts.Rag("rag_session", reader.retriever, by_session=True),
    "rag_utterance": texts.Rag("rag_utterance", reader.retriever, by_session=False),
    "full_context": texts.Newest("full_context", whole=True),
    "recency": texts.Newest("recency", whole=False),
    "oracle": texts.Oracle(),
    "none": texts.Nothing(),
  }
  return systems[config.eval.system], model
