"""From a configuration to the parts that jobs are made of: models, writer, reader, tasks, optimiser."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from attrimem_jax.data.synthetic import WorldConfig
from attrimem_jax.data.teacher import Sloppiness
from attrimem_jax.io import checkpoints, models
from attrimem_jax.io.client import Client
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.jobs.run import Run, earlier_config
from attrimem_jax.memory.prompts import COMPACT, FULL, Prompts
from attrimem_jax.memory.retrieval import Bm25, Dense, Retriever, last_token_embed
from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import bucket
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params
from attrimem_jax.nn.lora import Lora
from attrimem_jax.nn.quantised import quantise
from attrimem_jax.rl.optimizer import OptimizerSettings
from attrimem_jax.rollout.answering import Reader
from attrimem_jax.rollout.sampling import Sampling
from attrimem_jax.rollout.writing import Writer
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Module

PROMPTS = {"compact": COMPACT, "full": FULL}


def prompts(name: str) -> Prompts:
  return PROMPTS[name]


def client(settings: ConfigDict, run: Run, name: str) -> Client:
  """The client of an endpoint. Replies are kept in <run directory>/<name>.jsonl, or in the file that is given."""
  return Client(
    settings.url,
    settings.model,
    key=settings.key_env,
    cache=settings.cache or run.workdir / f"{name}.jsonl",
    concurrency=settings.concurrency,
    timeout=settings.timeout,
    retries=settings.retries,
    prices=tuple(settings.prices) or None,
    parameters=json.loads(settings.parameters),
  )


def world(config: ConfigDict) -> WorldConfig:
  """Sizes of the synthetic world."""
  return WorldConfig(**{name: tuple(low_high) for name, low_high in config.data.synthetic.items()})


def sloppiness(config: ConfigDict) -> Sloppiness:
  """How the synthetic world's teacher errs."""
  return Sloppiness(**config.data.teacher.to_dict())


def logprobs(config: ConfigDict, shape: DecoderConfig) -> Callable:
  """The log-probabilities that updates train on, at the run's precision and memory."""
  return functools.partial(decoder.token_logprobs, shape, dtype=config.policy.dtype, remat=config.rl.remat)


def chat(config: ConfigDict, tokenizer: Tokenizer) -> Chat:
  return Chat(tokenizer, thinking=config.policy.thinking)


def writer(config: ConfigDict, model: LanguageModel, temperature: float) -> Writer:
  """The policy of a run, sampling at `temperature`."""
  rollout = config.rollout
  return Writer(
    model=model,
    prompts=prompts(config.policy.prompts),
    sampling=Sampling(rollout.max_new_tokens, temperature, rollout.top_k, rollout.top_p),
    retriever=Bm25(top_k=rollout.records_top_k),
    modules=tuple(map(Module, rollout.modules)),
    core_budget=rollout.core_budget,
    records_budget=rollout.records_budget,
    chat=chat(config, model.tokenizer),
    dtype=config.policy.dtype,
    step=rollout.bucket,
    at_once=rollout.at_once,
  )


def reader(config: ConfigDict, model: LanguageModel, policy: LanguageModel) -> Reader:
  """The frozen answer model of a run with its retriever; `policy` is who wrote what it reads."""
  answer = config.answer
  return Reader(
    model=model,
    prompts=prompts(answer.prompts),
    retriever=retriever(config),
    max_context=answer.max_context,
    max_new_tokens=answer.max_new_tokens,
    dtype=answer.dtype,
    step=config.rollout.bucket,
    writer=policy.tokenizer,
  )


def retriever(config: ConfigDict) -> Retriever:
  chosen = config.answer.retriever
  if chosen.name == "bm25":
    return Bm25(top_k=chosen.top_k)
  model = models.load(chosen.model)
  embed = last_token_embed(model.config, model.params, model.tokenizer)
  return Dense(embed, top_k=chosen.top_k, instruction=chosen.instruction)


def policy_model(config: ConfigDict, run: Run) -> LanguageModel:
  """The starting policy: `policy.model`, with the parameters of the run `policy.checkpoint` if that is given.

  Of that run the newest step is taken when `run` begins, and the same one whenever it goes on: it is the reference of
  the KL too.
  """
  model = models.load(config.policy.model)
  if not config.policy.checkpoint:
    return model
  folder = pathlib.Path(os.path.expanduser(config.policy.checkpoint))
  step = run.pinned("policy.checkpoint", lambda: max(checkpoints.complete_steps(folder / "checkpoints"), default=None))
  return with_params(model, trained_params(folder, step, model))


def newest_params(run: Run, model: LanguageModel) -> Params:
  """Parameters of the run's newest checkpoint, or the model's own where the run has none."""
  return model.params if run.newest is None else trained_params(run.workdir, run.newest, model)


def trained_params(workdir: pathlib.Path, step: int | None, model: LanguageModel) -> Params:
  """The whole parameters that a run had reached at a step: if it trains low-rank factors, merged with what it froze.

  Args:
    workdir: of the run.
    step: a step that it has saved; None for the newest.
    model: of the shape that the run trains.

  Raises:
    ValueError: no checkpoint, other parameters than the model's, or factors beside weights of another model.
  """
  earlier = earlier_config(workdir / "config.json")
  factors = lora_of(earlier)
  if factors is None:
    return checkpoints.read_params(workdir / "checkpoints", model.params, step)
  name = earlier["answer" if earlier["job"] == "sft" and earlier["sft"]["task"] == "answer" else "policy"]["model"]
  frozen = models.load(name)
  if frozen.config != model.config:
    raise ValueError(
      f"{workdir} trains low-rank factors beside the weights of {name!r}, which has another shape than {model.name}: "
      f"set config.policy.model to {name!r}"
    )
  if earlier["job"] == "train" and earlier["policy"]["checkpoint"]:
    before = pathlib.Path(os.path.expanduser(earlier["policy"]["checkpoint"]))
    frozen = with_params(frozen, trained_params(before, earlier["pinned"]["policy.checkpoint"], frozen))
  found = checkpoints.read_params(workdir / "checkpoints", factors.abstract(frozen.config), step)
  return factors.merge(frozen.params, found)


def lora_of(config: Mapping[str, Any]) -> Lora | None:
  """The low-rank factors that a configuration trains; None where it trains all weights."""
  lora = config.get("lora")
  return Lora(lora["rank"], lora["alpha"], tuple(lora["targets"])) if lora and lora["targets"] else None


def answer_model(config: ConfigDict, policy: LanguageModel | None = None) -> LanguageModel:
  """The answer model, in 8 or 4 bits if so asked; the policy's own starting weights where both name the same model."""
  answer = config.answer
  if policy and answer.model == config.policy.model and not config.policy.checkpoint and answer.weights == "float":
    return policy
  model = models.load(answer.model)
  return model if answer.weights == "float" else with_params(model, quantise(model.params, answer.weights))


def with_params(model: LanguageModel, params: Params) -> LanguageModel:
  return dataclasses.replace(model, params=params)


def optimizer_settings(config: ConfigDict) -> OptimizerSettings:
  optim = config.optim
  return OptimizerSettings(
    name=optim.name,
    learning_rate=optim.lr,
    schedule=optim.schedule,
    warmup_steps=optim.warmup,
    total_steps=config.train.steps,
    final_fraction=optim.final_fraction,
    b1=optim.b1,
    b2=optim.b2,
    eps=optim.eps,
    weight_decay=optim.weight_decay,
    clip_norm=optim.clip_norm,
  )


def completion_width(config: ConfigDict, longest: int) -> int:
  """Columns of a completion in a training batch whose longest has so many tokens: few widths, so few programs."""
  return min(bucket(config.rollout.max_new_tokens, 8), bucket(longest, config.rollout.bucket))
