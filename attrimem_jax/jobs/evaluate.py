"""Evaluates on held-out histories: the policy (newest checkpoint of the run), or memories that need no policy.

The memories of the reference notes are what a perfect writer would leave, those of no writer at all are empty: between
these two lies what a policy can gain.
"""

import numpy as np
from ml_collections import ConfigDict

from attrimem_jax.data.teacher import PERFECT
from attrimem_jax.evaluation.runner import Evaluated, judge
from attrimem_jax.io import hosts
from attrimem_jax.io.metrics import write_json
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.grpo import Trainer
from attrimem_jax.jobs.run import Run
from attrimem_jax.jobs.tasks import Task
from attrimem_jax.memory import bank as banks
from attrimem_jax.memory.bank import Bank
from attrimem_jax.nn import sharding
from attrimem_jax.rl.teaching import write_as_teacher
from attrimem_jax.rollout.writing import Rollout


def run_evaluate(config: ConfigDict, run: Run) -> None:
  """Job `evaluate`: writes <workdir>/evaluate/NNN.json, a new file each time, so nothing of a run is touched.

  It holds whose memories were asked, the step of the checkpoint (0 for the starting policy), the whole configuration,
  the metrics, every answer and every memory.
  """
  trainer = Trainer(config, run)
  policy, step = config.eval.memory == "policy", run.newest or 0
  if policy:
    params = setup.newest_params(run, trainer.policy)
    done = trainer.evaluate(sharding.place(params, trainer.mesh))
    subject = f"step {step} of {run.workdir}" if run.newest else f"{trainer.policy.name}, untrained"
  else:
    done, subject = _ask_given(config, trainer), f"{config.eval.memory} memory"
  print(f"evaluated: {subject}", flush=True)
  metrics, rows = trainer.report(step if policy else 0, done)
  folder = run.workdir / "evaluate"
  path = folder / f"{len(list(folder.glob('*.json'))):03d}.json"
  content = {"subject": subject, "step": step, "metrics": metrics, "config": config.to_dict(), "answers": rows}
  content["memories"] = trainer.memory_rows(done)
  if hosts.leads():
    write_json(path, content)
  print(f"answers: {path}", flush=True)


def _ask_given(config: ConfigDict, trainer: Trainer) -> list[Evaluated]:
  tasks = [task for task in trainer.tasks.evaluation() if task.questions]
  rollouts = [Rollout(task.window, 0, (), _bank(config, trainer, task)) for task in tasks]
  with trainer.answering() as reader:
    return judge(reader, rollouts, [task.questions for task in tasks], config.reward.kind, trainer.answer_chat)


def _bank(config: ConfigDict, trainer: Trainer, task: Task) -> Bank:
  if config.eval.memory == "empty":
    return Bank.empty()
  if config.eval.memory == "teacher" or config.data.name == "synthetic":
    # The synthetic reference is a perfect teacher's bank, not the bare notes: changes have replaced what they change.
    sloppiness = setup.sloppiness(config) if config.eval.memory == "teacher" else PERFECT
    rng = np.random.default_rng(np.random.SeedSequence([config.seed, task.window.number]))
    return write_as_teacher(trainer.chat, task.episode, sloppiness=sloppiness, rng=rng)[0]
  dates = [session.date for session in task.window.history.sessions]
  return banks.from_notes(task.episode.notes, dates, trainer.chat.tokenizer)
