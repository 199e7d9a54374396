"""Supervised warm start on the synthetic world: a policy that writes as the teacher does, or a model that answers.

Batch n is a function of the seed and n. Batches are made on a thread of their own while the device trains.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from attrimem_jax.data import synthetic
from attrimem_jax.io import hosts, models
from attrimem_jax.io.metrics import write_lines
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.export import export
from attrimem_jax.jobs.grpo import Trainer
from attrimem_jax.jobs.run import Run
from attrimem_jax.jobs.tasks import Tasks, of_kinds
from attrimem_jax.nn import decoder, sharding
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.lora import whole
from attrimem_jax.rl import accumulation, expert, prompted, sft, teaching
from attrimem_jax.rl import optimizer as optimizers
from attrimem_jax.rl.teaching import Example, Widths
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer

_EVALUATION = 64  # held-out examples whose loss is reported, but not more than eight batches


def starting_model(config: ConfigDict) -> LanguageModel:
  """The model to train: loaded, or random of the shape `sft.init` with the vocabulary of `sft.tokenizer`."""
  if not config.sft.from_scratch:
    return models.load(config.policy.model if config.sft.task == "policy" else config.answer.model)
  tokenizer = Tokenizer.load(config.sft.tokenizer or models.SHIPPED_TOKENIZER)
  shape = DecoderConfig(vocab_size=tokenizer.vocab_size, **config.sft.init.to_dict())
  return LanguageModel("from scratch", shape, decoder.init(shape, jax.random.key(config.seed)), tokenizer)


def run_sft(config: ConfigDict, run: Run) -> None:
  """Trains for `train.steps`, resuming from the newest checkpoint of the run; ends with a model in HF format.

  With `train.eval_every` the policy also writes held-out histories and the answer model is asked about them, before the
  first step, as often as that, and after the last.
  """
  model = starting_model(config)
  source = Examples(config, model.tokenizer, taught(config, run, model.tokenizer) if config.sft.teacher.url else "")
  optimizer = optimizers.make_optimizer(setup.optimizer_settings(config))
  logprobs = setup.logprobs(config, model.config)
  lora = setup.lora_of(config)
  update = sft.make_sft_update(model.config, optimizer, logprobs, lora)
  held_out = sft.make_sft_evaluation(model.config, logprobs)
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  frozen = sharding.place(model.params, mesh) if lora else None
  trained = lora.init(model.config, config.seed) if lora else model.params
  state = run.begin(optimizers.init_state(optimizer, sharding.place(trained, mesh)))
  trainer = Trainer(config, run) if config.train.eval_every else None
  if trainer is not None:
    trainer.evaluate_if_due(int(state.step), whole(lora, frozen, state.params))
  size = min(_EVALUATION, 8 * config.sft.batch)
  ways = sharding.batch_ways(mesh)
  validation = _place(source.batch_of(config.eval.split, 0, -(-size // ways) * ways), mesh)
  start = int(state.step)
  with run.progress(start, config.train.steps) as progress:
    for step, batch in zip(range(start, config.train.steps), source.batches(start), strict=False):
      state, metrics = update(state, _place(batch, mesh), frozen)
      last = step + 1 == config.train.steps
      if last or (step + 1) % config.train.log_every == 0:
        loss, _ = held_out(whole(lora, frozen, state.params), validation)
        named = {f"train/{name}": float(value) for name, value in jax.device_get(metrics).items()}
        run.log(step + 1, named | {"eval/loss": float(loss)})
        progress.show(step + 1, {"loss": named["train/loss"], "eval loss": float(loss)})
      if run.due(step + 1, config.train.checkpoint_every, last):
        run.save(step + 1, state)
      if run.stopping:
        return
      if trainer is not None and (last or (step + 1) % config.train.eval_every == 0):
        trainer.evaluate_if_due(step + 1, whole(lora, frozen, state.params))
  trained = sharding.fetch(state.params)
  if hosts.leads():
    params = lora.merge(model.params, trained) if lora else trained
    export(setup.with_params(model, params), config, pathlib.Path(config.export.out or run.workdir / "export"))


def _place(batch: sft.SftBatch, mesh: Mesh) -> sft.SftBatch:
  return sharding.place_batch(accumulation.split(batch, 1), mesh)


def taught(config: ConfigDict, run: Run, tokenizer: Tokenizer) -> str:
  """The file of what `sft.teacher` has written: asked for once, and kept in the run directory."""
  path, settings, rollout = run.workdir / "teacher" / expert.FILE, config.sft.teacher, config.rollout
  if hosts.leads() and not path.exists():
    chat = Chat(tokenizer, thinking=config.policy.thinking)
    histories = Tasks(config, chat, setup.prompts(config.policy.prompts)).histories(
      config.data.split, settings.histories
    )
    with setup.client(settings, run, "teacher/replies") as client:
      rows, report = prompted.write(
        client.texts, chat, histories, core_budget=rollout.core_budget, records_budget=rollout.records_budget
      )
      print(f"teacher {settings.model}: {report}; {client.spent}", flush=True)
    write_lines(path, rows)
  hosts.meet("teacher")
  return str(path)


class Examples:
  """Batches of supervised examples; batch n depends on the seed and n alone. `path` stands for `sft.path`."""

  def __init__(self, config: ConfigDict, tokenizer: Tokenizer, path: str = ""):
    self._config, self._path = config, path or config.sft.path
    self._chat = Chat(tokenizer, thinking=config.policy.thinking)
    self._world = setup.world(config)
    self._widths = Widths(**config.sft.widths.to_dict())
    self._make: Callable[[str, int], list[Example]] = self._writing if config.sft.task == "policy" else self._answering
    if self._path:
      self._experts = self._read_experts()
      self._make = self._expert

  def batches(self, start: int) -> Iterator[sft.SftBatch]:
    """Batches from step `start` on, made ahead of their use."""
    make = functools.partial(self.batch_of, "train", size=self._config.sft.batch)
    with ThreadPoolExecutor(1) as pool:
      ahead = [pool.submit(make, start + i) for i in range(4)]
      for step in itertools.count(start + 4):
        yield ahead.pop(0).result()
        ahead.append(pool.submit(make, step))

  def batch_of(self, split: str, number: int, size: int) -> sft.SftBatch:
    """Batch `number` of a split: the first `size` examples that fit, from a range of episodes that is its own.

    Raises:
      ValueError: hardly any example fits `sft.widths`.
    """
    episodes = range(number * size * 4, number * size * 4 + 20 * size)
    fitting = (e for i in episodes for e in self._make(split, i) if self._widths.holds(e))
    chosen = list(itertools.islice(fitting, size))
    if len(chosen) < size:
      first = next((e for i in episodes for e in self._make(split, i)), None)
      if first is None:
        raise ValueError(
          f"{len(episodes)} histories hold no question of the kinds {', '.join(self._config.data.kinds)}: lengthen "
          "them (config.data.synthetic) or add to config.data.kinds"
        )
      prompt, completion = (max(len(suffix[part]) for suffix in first.suffixes) for part in (0, 1))
      raise ValueError(
        f"config.sft.widths hold {len(chosen)} of the examples of {len(episodes)} histories, but a batch needs {size}; "
        f"the first one has a prefix of {len(first.prefix)}, prompts of up to {prompt} and completions of up to "
        f"{completion} tokens: raise the widths"
      )
    return teaching.batch(chosen, self._widths)

  def _writing(self, split: str, index: int) -> list[Example]:
    episode, rng = self._episode(split, index)
    sloppiness, prompts = setup.sloppiness(self._config), setup.prompts(self._config.policy.prompts)
    return teaching.writing_examples(self._chat, prompts, episode, sloppiness=sloppiness, rng=rng)

  def _read_experts(self) -> dict[bool, list[Example]]:
    """Examples of expert sessions: False for training, True for those held out. Prints what could not be taken over."""
    config = self._config
    trajectories, report = expert.read(self._path, self._chat)
    print(report, flush=True)
    held = len(trajectories) - config.data.holdout
    if held < 1:
      raise ValueError(
        f"{self._path} holds {len(trajectories)} conversations, of which config.data.holdout={config.data.holdout} "
        "are held out: nothing is left to train on"
      )
    prompts, budget = setup.prompts(config.policy.prompts), config.rollout.records_budget
    examples = [teaching.trajectory_examples(self._chat, prompts, t.history, t.calls, budget) for t in trajectories]
    return {
      False: [e for some in examples[:held] for e in some],
      True: [e for some in examples[held:] for e in some],
    }

  def _expert(self, split: str, index: int) -> list[Example]:
    """A session drawn by the index alone, as the conversations have an end and indices have none."""
    examples = self._experts[split != "train"]
    rng = np.random.default_rng(np.random.SeedSequence([self._config.seed, synthetic.SPLITS.index(split), index, 2]))
    return [examples[int(rng.integers(len(examples)))]]

  def _answering(self, split: str, index: int) -> list[Example]:
    episode, rng = self._episode(split, index)
    prompts = setup.prompts(self._config.answer.prompts)
    episode = dataclasses.replace(episode, questions=tuple(of_kinds(episode.questions, self._config.data.kinds)))
    return [teaching.answering_example(self._chat, prompts, episode, rng=rng)] if episode.questions else []

  def _episode(self, split: str, index: int):
    seed = self._config.data.seed
    rng = np.random.default_rng(np.random.SeedSequence([seed, synthetic.SPLITS.index(split), index, 1]))
    return synthetic.episode(self._world, split, seed, index), rng
