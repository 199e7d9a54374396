"""The training loop: write, answer, score, fit, update (AttriMem, arXiv 2607.21106).

Each step draws `rollout.histories` windows, writes each G times, asks the frozen answer model, explains its answers by
ablation, gives every written token its own reward, and makes one compiled GRPO update. Step n is a function of the seed
and n, so a run that was stopped goes on as if it had not been.

Symbols of the paper: ŷ is `Answer.completion`, φ_j `Attribution.weights`, r_{i,t,k} `Credit.rewards`, Â_out
`Valued.outcome`, Â_{i,t,k} `Valued.advantages`, λ `rl.lambda_`. Left out: the outcome judge (scores here are string
metrics) and anything the paper keeps to itself (its prompts, retriever, λ).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from attrimem_jax import validation
from attrimem_jax.attribution.ablations import masks_at
from attrimem_jax.attribution.attribute import Attribution, Measurement, Problem, fit, gated, measure
from attrimem_jax.attribution.attribute import judge as judge_attributions
from attrimem_jax.attribution.credit import Unit
from attrimem_jax.data.coverage import coverage
from attrimem_jax.evaluation.runner import (
  Evaluated,
  answer_rows,
  evaluate,
  gain,
  judge,
  memory_metrics,
  summarise,
)
from attrimem_jax.io import hosts
from attrimem_jax.io.clock import Clock
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run
from attrimem_jax.jobs.tasks import Task, Tasks
from attrimem_jax.memory.context import answer_prefix
from attrimem_jax.nn import sharding
from attrimem_jax.nn.decoder import Params
from attrimem_jax.nn.lora import whole
from attrimem_jax.rl import accumulation
from attrimem_jax.rl import optimizer as optimizers
from attrimem_jax.rl.advantages import reward_statistics
from attrimem_jax.rl.collapse import Limits, collapsed, signs
from attrimem_jax.rl.experience import AdvantageSettings, Group, Valued, training_batch, value
from attrimem_jax.rl.loss import LossSettings
from attrimem_jax.rl.update import check_first_step, make_update
from attrimem_jax.rollout.answering import Answer, Reader
from attrimem_jax.rollout.writing import write
from attrimem_jax.view import terminal
from attrimem_jax.view.report import write_report


def run_grpo(config: ConfigDict, run: Run) -> None:
  """Trains for `train.steps`, resuming from the newest checkpoint; evaluates before, during and after.

  Where the policy collapses (`train.collapse`) the run ends early. A step that shows a sign of it is not saved, so the
  newest checkpoint, which the job `evaluate` takes, is of a step before.
  """
  limits = Limits(**config.train.collapse.to_dict())
  trainer = Trainer(config, run)
  state = run.begin(trainer.initial_state())
  start, moved = int(state.step), int(state.step) > 0
  trainer.evaluate_if_due(start, trainer.whole(state.params))
  past = run.rows()
  with run.progress(start, config.train.steps) as progress:
    for step in range(start, config.train.steps):
      if run.stopping:
        break
      state, metrics = trainer.step(step, state)
      moved = moved or check_first_step({name.removeprefix("train/"): value for name, value in metrics.items()})
      run.log(step + 1, metrics)
      progress.show(step + 1, {n: metrics[f"train/{n}"] for n in ("reward", "kl", "memory_tokens")})
      last = step + 1 == config.train.steps
      due = run.due(step + 1, config.train.checkpoint_every, last)
      past.append(metrics)
      if sign := collapsed(past, limits):
        _tell_collapse(sign, limits, step + 1, run)
        break
      if due and (last or not signs(metrics, limits)):
        run.save(step + 1, state)
      if not run.stopping:
        trainer.evaluate_if_due(step + 1, trainer.whole(state.params))
  trainer.conclude()


def _tell_collapse(sign: str, limits: Limits, step: int, run: Run) -> None:
  kept = f"the newest checkpoint is of step {run.newest}" if run.newest else "there is no checkpoint of a step before"
  print(
    f"step {step}: the policy collapsed, its {sign} is beyond config.train.collapse.{sign}={getattr(limits, sign)} for "
    f"{limits.patience} steps; {kept}. Lower config.optim.lr or raise config.rl.kl in another --workdir",
    flush=True,
  )


class Trainer:
  """The parts of one training run, loaded and checked, and its compiled update."""

  def __init__(self, config: ConfigDict, run: Run):
    self.config, self.run = config, run
    self.mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    self.policy = setup.policy_model(config, run)
    answer = setup.answer_model(config, self.policy)
    validation.validate_lengths(config, self.policy.config, answer.config)
    # The reference is the starting policy, in buffers of its own: the state's are donated to every update. An answer
    # model of the same weights is frozen too, so they share theirs. Low-rank factors stand beside the reference, which
    # then is a part of the policy and never waits in host memory.
    self.lora = setup.lora_of(config)
    same, needed = answer is self.policy, bool(config.rl.kl or self.lora)
    waits, factors = config.train.offload, self.lora is not None
    self.answer = sharding.Frozen(answer.params, self.mesh, waits and not (same and factors))
    starting = self.answer if same else needed and sharding.Frozen(self.policy.params, self.mesh, waits and not factors)
    self.reference = starting if needed else None
    self.chat = setup.chat(config, self.policy.tokenizer)
    self.tasks = Tasks(config, self.chat, setup.prompts(config.policy.prompts))
    self.answer_model, self.reader = answer, setup.reader(config, answer, self.policy)
    self.answer_chat = setup.chat(config, answer.tokenizer)
    self.header = answer_prefix(self.answer_chat, self.reader.prompts)
    self.optimizer = optimizers.make_optimizer(setup.optimizer_settings(config))
    logprobs = setup.logprobs(config, self.policy.config)
    self.update = make_update(self.policy.config, self.optimizer, _loss_settings(config), logprobs, self.lora)
    self.advantages = AdvantageSettings(
      config.rl.lambda_,
      Unit(config.attribution.unit),
      config.rl.normalise,
      config.rl.clip_process,
      config.rl.drop_flat_groups,
    )
    if self.tasks.report:
      print(self.tasks.report, flush=True)

  def initial_state(self) -> optimizers.TrainState:
    starting = self.lora.init(self.policy.config, self.config.seed) if self.lora else self.policy.params
    return optimizers.init_state(self.optimizer, sharding.place(jax.tree.map(np.array, starting), self.mesh))

  def whole(self, trained: Params) -> Params:
    """The policy's parameters, from what is trained of them."""
    with self._reference() as frozen:
      return whole(self.lora, frozen, trained)

  def _reference(self) -> AbstractContextManager[Params | None]:
    return self.reference.on_devices() if self.reference else nullcontext()

  @contextmanager
  def answering(self) -> Iterator[Reader]:
    """The reader, its model's weights on the devices."""
    with self.answer.on_devices() as params:
      yield dataclasses.replace(self.reader, model=setup.with_params(self.answer_model, params))

  def step(self, step: int, state: optimizers.TrainState) -> tuple[optimizers.TrainState, dict[str, float]]:
    """One GRPO step: (new state, metrics with slash-separated names)."""
    clock, config = Clock(), self.config.attribution
    tasks, groups, drawn = self._experience(step, self.whole(state.params), clock)
    with clock("score"):
      measurements = self._measure(step, groups)
    with clock("fit"):
      attributions = self._gated(fit(measurements, alpha=config.alpha, penalty=config.penalty))
      groups = _with_attributions(groups, attributions)
    valued = [value(group, self.advantages, self.policy.tokenizer) for group in groups]
    batch = self._batch(tasks, valued)
    with clock("update"), self._reference() as reference:
      state, metrics = self.update(state, reference, batch)
      measured = {name: float(v) for name, v in jax.device_get(metrics).items()}
    self.run.rollouts(step + 1, rollout_rows(groups, valued, self.policy.tokenizer))
    measured |= _metrics(groups, valued, attributions)
    measured |= {"drawn_groups": float(len(drawn)), "flat_drawn": float(np.mean([group.flat for group in drawn]))}
    return state, {f"train/{name}": v for name, v in measured.items()} | clock.times

  def evaluate(self, params) -> list[Evaluated]:
    """Writes, asks and scores the held-out tasks."""
    config = self.config
    tasks = [task for task in self.tasks.evaluation() if task.questions]
    key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
    with self.run.progress(0, len(tasks), "window") as progress, self.answering() as reader:
      return evaluate(
        setup.writer(config, setup.with_params(self.policy, params), config.eval.temperature),
        reader,
        [task.window for task in tasks],
        [task.questions for task in tasks],
        key,
        config.reward.kind,
        self.answer_chat,
        show=lambda done: progress.show(done, {}),
      )

  def evaluate_if_due(self, step: int, params) -> None:
    """Evaluates where the recipe asks for it, and keeps metrics and answers, unless the run has done so before."""
    every, last = self.config.train.eval_every, self.config.train.steps
    if not (step in (0, last) or (every and step % every == 0)) or self.run.evaluated(step):
      return
    done = self.evaluate(params)
    metrics, rows = self.report(step, done)
    self.run.evaluation(step, rows)
    self.run.memories(step, self.memory_rows(done))
    self.run.log(step, {f"eval/{name}": v for name, v in metrics.items()})

  def report(self, step: int, done: Sequence[Evaluated]) -> tuple[dict[str, float], list[dict]]:
    """(metrics of what was evaluated, one row per answer); prints the accuracy."""
    config = self.config
    sizes = {"samples": config.eval.bootstrap, "confidence": config.eval.confidence}
    metrics, rows = summarise(done, **sizes), answer_rows(done)
    if config.data.name == "synthetic":
      metrics |= shares(self.memory_rows(done))
    before = self.run.first_evaluation() if step else None
    metrics |= gain(rows, before, **sizes) if before else {}
    low, high = metrics["accuracy_low"], metrics["accuracy_high"]
    print(
      f"step {step}: held-out accuracy {metrics['accuracy']:.3f} [{low:.3f}, {high:.3f}] "
      f"on {metrics['questions']} questions, {metrics['memory_tokens']:.0f} tokens of memory each",
      flush=True,
    )
    return metrics, rows

  def memory_rows(self, done: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """One row per memory: its history, its current records and, in the synthetic world, what they are worth."""
    episodes = {task.window.history.id: task.episode for task in self.tasks.evaluation()}
    rows = []
    for e in done:
      history, current = e.rollout.window.history.id, e.rollout.bank.current()
      row: dict[str, Any] = {"history": history, "memory": [f"#{r.id} [{r.module}] {r.text}" for r in current]}
      if self.config.data.name == "synthetic":
        row |= dataclasses.asdict(coverage(episodes[history], current))
      rows.append(row)
    return rows

  def conclude(self) -> None:
    """Prints how accuracy and reward moved, and leaves the report."""
    if not hosts.leads():
      return
    print(terminal.summary(self.run.rows()), flush=True)
    print(f"report: {write_report(self.run.workdir)}", flush=True)

  def _experience(self, step: int, params, clock: Clock) -> tuple[list[Task], list[Group], list[Group]]:
    """(tasks, their answered groups, all groups that were drawn).

    While a group is flat, other histories are drawn, as many as a step has and at most `rl.redraw` times; those that
    are not flat take the places of the flat ones. Draws depend on seed, step and draw alone.
    """
    tasks: list[Task] = []
    groups: list[Group] = []
    drawn: list[Group] = []
    for draw in range(1 + self.config.rl.redraw):
      others = self.tasks.training(step, draw)
      with clock("write"):
        written = self._write(step, params, others)
      with clock("answer"):
        answered = self._answer(others, written)
      drawn += answered
      if not draw:
        tasks, groups = others, answered
      fresh = [pair for pair in zip(others, answered, strict=True) if draw and not pair[1].flat]
      for place, group in enumerate(groups):
        if group.flat and fresh:
          tasks[place], groups[place] = fresh.pop(0)
      if not any(group.flat for group in groups):
        break
    return tasks, groups, drawn

  def _write(self, step: int, params, tasks: Sequence[Task]) -> list[Group]:
    writer = setup.writer(self.config, setup.with_params(self.policy, params), self.config.rollout.temperature)
    key = jax.random.fold_in(jax.random.key(self.config.seed), step)
    rollouts = write(writer, [task.window for task in tasks], self.config.rollout.group_size, key)
    return [Group(tuple(rows), (), np.zeros((len(rows), 0))) for rows in rollouts]

  def _answer(self, tasks: Sequence[Task], groups: Sequence[Group]) -> list[Group]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    questions = [task.questions for task, group in zip(tasks, groups, strict=True) for _ in group.rollouts]
    with self.answering() as reader:
      judged = iter(judge(reader, rollouts, questions, self.config.reward.kind, self.answer_chat))
    return [_judged([next(judged) for _ in group.rollouts]) for group in groups]

  def _measure(self, step: int, groups: Sequence[Group]) -> list[Measurement]:
    """What the credit of every answer is made of that leans on something this rollout wrote."""
    config = self.config.attribution
    if self.config.rl.lambda_ == 0 or config.unit == "none":
      return []
    problems = [p for w, group in enumerate(groups) for p in self._problems(group, (self.config.seed, step, w))]
    with self.answering() as reader:
      return measure(
        reader.model,
        self.header,
        problems,
        0 if config.gradients else masks_at(step, config.masks),
        gradients=config.gradients,
        keep=config.keep,
        scorer=config.scorer,
        dtype=self.config.answer.dtype,
        step=self.config.rollout.bucket,
      )

  def _problems(self, group: Group, path: tuple[int, ...]) -> Iterator[Problem]:
    for g, answers in enumerate(group.answers):
      for q, answer in enumerate(answers):
        explained, rival = self._explained(answer, bool(group.scores[g, q] == 1))
        if answer.context.sources and len(explained):
          yield Problem(answer.prompt, answer.source, answer.context.sources, explained, (*path, g, q), rival)

  def _explained(self, answer: Answer, right: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Ids of the answer whose probability is explained (what the model said, or the gold answer), and of its rival.

    "contrast" explains why a wrong answer was given instead of the gold one, and a right answer by itself.
    """
    said, explain = answer.completion.ids, self.config.attribution.explain
    if explain == "generated" or answer.question.abstain or (explain == "contrast" and right):
      return said, None
    gold = np.array(self.answer_chat.completion(answer.question.answers[-1]), np.int32)
    return gold, said if explain == "contrast" and len(said) else None

  def _gated(self, attributions: Sequence[Attribution]) -> Sequence[Attribution]:
    """Credit that counts as much as held-out masks confirm it, where the recipe asks for that."""
    masks, keep = self.config.attribution.gate, self.config.attribution.keep
    if not masks:
      return attributions
    settings = {"dtype": self.config.answer.dtype, "step": self.config.rollout.bucket}
    with self.answering() as reader:
      judged = judge_attributions(reader.model, self.header, attributions, masks, top=(), keep=keep, **settings)
    return [gated(*pair) for pair in zip(attributions, judged, strict=True)]

  def _batch(self, tasks: Sequence[Task], valued: Sequence[Sequence[Valued]]):
    config = self.config
    longest = max(task.window.stop - task.window.start for task in tasks)
    micro = config.rl.micro_batches
    pieces = micro * sharding.batch_ways(self.mesh)
    prefixes = -(-len(tasks) * longest // pieces) * pieces
    written = max(len(v.call.completion.ids) for calls in valued for v in calls)
    width = setup.completion_width(config, written)
    batch = training_batch(valued, prefixes=prefixes, width=width, step=config.rollout.bucket)
    return sharding.place_batch(accumulation.split(batch, micro), self.mesh)


def shares(memories: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Of `Trainer.memory_rows`, means over memories: the share of the facts that one holds (1 where none was told), and
  of its tokens those that state a fact, and those that a question needs (0 of an empty memory)."""
  return {
    "fact_recall": float(np.mean([row["held"] / row["facts"] if row["facts"] else 1.0 for row in memories])),
    "fact_precision": float(np.mean([row["stating"] / max(1, row["tokens"]) for row in memories])),
    "needed_tokens": float(np.mean([row["needed"] / max(1, row["tokens"]) for row in memories])),
  }


def _judged(rows: Sequence[Evaluated]) -> Group:
  scores = np.array([row.scores for row in rows], np.float64).reshape(len(rows), -1)
  return Group(tuple(row.rollout for row in rows), tuple(row.answers for row in rows), scores)


def _with_attributions(groups: Sequence[Group], attributions: Sequence[Attribution]) -> list[Group]:
  """Hands every attribution to the group it belongs to, by the window's place in the problem's seed."""
  return [
    Group(g.rollouts, g.answers, g.scores, tuple(a for a in attributions if a.problem.seed[2] == w))
    for w, g in enumerate(groups)
  ]


def _loss_settings(config: ConfigDict) -> LossSettings:
  rl = config.rl
  return LossSettings(
    clip_low=rl.clip_low,
    clip_high=rl.clip_high,
    kl_coefficient=rl.kl,
    normalisation=rl.loss_norm,
    constant_length=config.rollout.max_new_tokens,
    temperature=config.rollout.temperature,
  )


def _metrics(groups: Sequence[Group], valued: Sequence[Sequence[Valued]], attributions: Sequence[Attribution]) -> dict:
  """What a step says about rewards (spread within groups and across the batch apart), credit and memories."""
  rewards = np.array([group.rewards for group in groups])
  statistics = reward_statistics(np.nan_to_num(rewards), np.isfinite(rewards))
  credit = [v.credit for group in valued for v in group]
  sources = np.concatenate([c.rewards[c.is_source] for c in credit]) if credit else np.zeros(0)
  metrics = {
    "reward": statistics.mean,
    "reward_std_within_groups": statistics.std_within_group,
    "reward_std_across_groups": statistics.std_across_batch,
    "flat_groups": statistics.flat_fraction,
    "invalid_rollouts": float(statistics.invalid),
    "sources": float(len(sources)),
    "credit_nonzero": float(np.mean(sources != 0)) if len(sources) else 0.0,
    "credit_abs": float(np.mean(np.abs(sources))) if len(sources) else 0.0,
    "lasso_gap": max((a.gap for a in attributions), default=0.0),
  }
  judged = [a.faithfulness.lds for a in attributions if a.faithfulness]
  metrics |= {"attribution_lds": float(np.mean(judged))} if judged else {}
  return metrics | memory_metrics([rollout for group in groups for rollout in group.rollouts])


def rollout_rows(groups: Sequence[Group], valued: Sequence[Sequence[Valued]], tokenizer) -> list[dict]:
  """One row per rollout for rollouts/step_*.jsonl: every token with its log-probability, attribution and advantage."""
  rows = []
  for group, calls in zip(groups, valued, strict=True):
    for g, rollout in enumerate(group.rollouts):
      mine = [v for v in calls if v.call.key.rollout == g]
      rows.append(
        {
          "history": rollout.window.history.id,
          "rollout": g,
          "reward": None if np.isnan(group.rewards[g]) else float(group.rewards[g]),
          "memory": [f"#{r.id} [{r.module}] {r.text}" for r in rollout.bank.current()],
          "answers": [
            {"question": a.question.text, "gold": list(a.question.answers), "answer": a.text, "score": float(s)}
            for a, s in zip(group.answers[g], group.scores[g], strict=True)
          ],
          "calls": [_call_row(v, tokenizer) for v in mine],
        }
      )
  return rows


def _call_row(valued: Valued, tokenizer) -> dict:
  call = valued.call
  ids = call.completion.ids.tolist()
  return {
    "session": call.key.session,
    "module": call.key.module,
    "finish": call.completion.finish,
    "text": tokenizer.decode(ids),
    "ids": ids,
    "prompt_ids": [*map(int, call.prefix), *map(int, call.prompt)],
    "logps": [round(float(x), 6) for x in call.completion.logps],
    "actions": [{"line": a.line, "reason": a.reason} for a in call.actions],
    "attribution": [
      float(x) if s else None for x, s in zip(valued.credit.rewards, valued.credit.is_source, strict=True)
    ],
    "outcome": float(valued.outcome),
    "advantages": [float(x) for x in valued.advantages],
  }
