"""Checks of a configuration, all problems at once: a line for each says where, what, the value got, how to mend it.

`validate` runs before anything is loaded, `validate_lengths` when the shapes of the models are known.
"""

import importlib.util
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

from attrimem_jax import arms as study
from attrimem_jax import checks
from attrimem_jax.attribution.ablations import LEVELS
from attrimem_jax.data import benchmarks, reading, synthetic
from attrimem_jax.io.client import RESERVED
from attrimem_jax.nn.lora import TARGETS
from attrimem_jax.nn.quantised import BITS
from attrimem_jax.types import Module

if TYPE_CHECKING:
  from attrimem_jax.nn.config import DecoderConfig

# Synthetic data have the first three; benchmarks train, test and all, or what a file of splits names.
_SPLITS = ("train", "eval", "test", "all", "sft", "rl")

# Every key that takes one of a few words.
CHOICES: Mapping[str, tuple[str, ...]] = {
  "job": ("train", "sft", "evaluate", "benchmark", "attribute", "export", "plan", "retention", "study", "serve"),
  "data.name": ("synthetic", *benchmarks.READERS),
  "data.split": _SPLITS,
  "eval.memory": ("policy", "reference", "teacher", "empty"),
  "eval.split": _SPLITS,
  "eval.system": ("policy", "rag_session", "rag_utterance", "full_context", "oracle", "recency", "none"),
  "policy.prompts": ("compact", "full"),
  "policy.dtype": ("float32", "bfloat16"),
  "policy.overlong": ("fail", "split", "cut"),
  "answer.prompts": ("compact", "full"),
  "answer.dtype": ("float32", "bfloat16"),
  "answer.weights": ("float", *BITS),
  "answer.retriever.name": ("bm25", "dense"),
  "rollout.horizon.bank": ("empty", "reference"),
  "reward.kind": ("contains", "f1", "exact"),
  "attribution.penalty": ("raw", "context_cite", "relative", "held_out"),
  "attribution.explain": ("generated", "gold", "contrast"),
  "attribution.scorer": ("exact", "masked", "cached"),
  "explain.sources": ("token", "word", "sentence", "record"),
  "attribution.unit": ("token", "span", "action", "none"),
  "rl.normalise": ("zscore", "scale", "none"),
  "rl.loss_norm": ("token", "sequence", "constant"),
  "optim.name": ("adamw", "muon"),
  "optim.schedule": ("constant", "cosine"),
  "retention.regime": ("blind", "oracle"),
  "retention.turns": ("all", "user"),
  "sft.task": ("policy", "answer"),
  "sft.init.family": ("qwen3", "qwen2", "llama"),
  "serve.dtype": ("float32", "bfloat16"),
  "export.dtype": ("float32", "bfloat16", "float16"),
}

_ENDPOINTS = ("eval.judge", "answer.endpoint", "sft.teacher")

# The least value of a key, and the advice that goes with it.
_AT_LEAST: Mapping[str, float] = {
  "seed": 0,
  "data.seed": 0,
  "data.holdout": 1,
  "policy.max_prompt": 1,
  "answer.max_context": 1,
  "answer.max_new_tokens": 1,
  "answer.retriever.top_k": 1,
  "rollout.group_size": 2,  # a group of one has nothing to be compared with
  "rollout.histories": 1,
  "rollout.horizon.sessions": 0,
  "rollout.temperature": 0,
  "rollout.top_k": 0,
  "rollout.max_new_tokens": 1,
  "rollout.at_once": 0,
  "rollout.core_budget": 0,
  "rollout.records_top_k": 1,
  "rollout.records_budget": 0,
  "rollout.bucket": 1,
  "reward.questions": 0,
  "attribution.gradients": 0,
  "attribution.gate": 0,
  "attribution.alpha": 1e-6,  # without a penalty no source could be told from noise
  "explain.masks": 0,
  "explain.held_out": 2,
  "rl.lambda_": 0,
  "rl.clip_process": 0,
  "rl.clip_low": 0,
  "rl.clip_high": 0,
  "rl.kl": 0,
  "rl.redraw": 0,
  "rl.micro_batches": 1,
  "lora.rank": 1,
  "lora.alpha": 1e-6,  # at 0 the factors would count for nothing
  "optim.lr": 0,
  "optim.warmup": 0,
  "optim.weight_decay": 0,
  "optim.clip_norm": 0,
  "optim.eps": 0,
  "train.steps": 0,
  "train.log_every": 1,
  "train.eval_every": 0,
  "train.checkpoint_every": 1,
  "train.keep_checkpoints": 1,
  **{f"train.collapse.{name}": 0 for name in ("patience", "entropy", "kl", "reward")},
  "eval.episodes": 1,
  "eval.questions": 0,
  "eval.window": 0,
  "eval.temperature": 0,
  "eval.bootstrap": 1,
  "retention.splits": 1,
  "retention.cases": 0,
  "study.seeds": 1,
  "serve.port": 0,
  "serve.timeout": 0.001,
  "serve.grace": 0,
  **{f"serve.{name}": 1 for name in ("queue", "batch", "max_new_tokens", "body")},
  **{
    f"{endpoint}.{name}": least
    for endpoint in _ENDPOINTS
    for name, least in (("concurrency", 1), ("timeout", 0.001), ("retries", 0))
  },
  "sft.teacher.histories": 1,
  "eval.judge.calibration": 0,
  "eval.judge.tries": 1,
  "sft.batch": 1,
  "sft.widths.rows": 1,
  "sft.widths.prefix": 1,
  "sft.widths.prompt": 1,
  "sft.widths.completion": 1,
  "sft.init.width": 1,
  "sft.init.layers": 1,
  "sft.init.heads": 1,
  "sft.init.kv_heads": 1,
  "sft.init.head_size": 2,
  "sft.init.hidden": 1,
  "sft.init.rope_theta": 1,
  "sft.init.norm_eps": 0,
  "sft.init.max_positions": 1,
  "hosts.processes": 0,
  "hosts.process": -1,
  "hosts.timeout": 1,
  **{f"plan.{name}": 0 for name in ("session", "prompt", "completion", "context", "answer")},
  "mesh.data": 1,
  "mesh.fsdp": 1,
  "mesh.tensor": 1,
}

# The greatest value of a key. What lies beyond is a slip of the keyboard: it would run for days before it failed.
_AT_MOST: Mapping[str, float] = {
  "rl.redraw": 3,
  "lora.rank": 4096,
  "optim.lr": 1.0,
  "serve.port": 65_535,
  "serve.queue": 1_000_000,
  "serve.batch": 4096,
  "serve.body": 1_000_000_000,
  "seed": checks.SEEDS,
  "data.seed": checks.SEEDS,
  "rollout.group_size": 4096,
  "rollout.histories": 65_536,
  "eval.episodes": 1_000_000,
  "eval.bootstrap": 1_000_000,
  **{
    f"{endpoint}.{name}": 1024 for endpoint in ("eval.judge", "answer.endpoint") for name in ("concurrency", "retries")
  },
  "eval.judge.tries": 10,
  "attribution.gradients": len(LEVELS),
  "attribution.gate": 65_536,
  "explain.masks": 65_536,
  "explain.held_out": 65_536,
  "sft.batch": 65_536,
}
_MOST_MASKS = 65_536

# Keys between 0 and 1: whether 0 itself and 1 itself are allowed.
_UNIT_INTERVAL: Mapping[str, tuple[bool, bool]] = {
  "data.teacher.miss": (True, True),
  "data.teacher.chatter": (True, True),
  "data.teacher.blur": (True, True),
  "rollout.top_p": (False, True),
  "attribution.keep": (False, False),
  "optim.final_fraction": (True, True),
  "optim.b1": (True, False),
  "optim.b2": (True, False),
  "eval.confidence": (False, False),
  "plan.utilisation": (False, True),
  "retention.keep": (False, True),
}


def validate(config: ConfigDict, devices: int | None = None, processes: int = 1) -> None:
  """Checks every value by itself and against the others.

  Args:
    config: what a recipe returned, with the overrides of the command line.
    devices: how many accelerators there are, or None to leave the mesh unchecked.
    processes: how many processes they belong to.

  Raises:
    ValueError: lists all problems, one numbered line each: where, what, the value got, and how to mend it.
  """
  _raise([*_single_values(config), *_cross_checks(config), *_hosts(config), *_mesh(config, devices, processes)])


def validate_lengths(config: ConfigDict, policy: "DecoderConfig", answer: "DecoderConfig | None" = None) -> None:
  """Checks that prompt and completion fit the models' positions; raises like `validate`."""
  problems = []
  for name, model, prompt, completion in (
    ("policy", policy, "policy.max_prompt", "rollout.max_new_tokens"),
    ("answer", answer, "answer.max_context", "answer.max_new_tokens"),
  ):
    longest = get(config, prompt) + get(config, completion)
    if model is not None and longest > model.max_positions:
      what = f"with config.{completion}={get(config, completion)} makes {longest} tokens"
      what += f", but the {name} model has {model.max_positions} positions"
      room = model.max_positions - get(config, completion)
      problems.append(
        _problem(config, prompt, what, f"Use at most {room}." if room > 0 else f"Lower config.{completion}.")
      )
  _raise(problems)


def _raise(problems: list[str]) -> None:
  if problems:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
    raise ValueError("\n".join([f"{count} in the configuration:", *lines]))


def _problem(config: ConfigDict, name: str, what: str, mend: str) -> str:
  value = get(config, name)
  shown = value.to_dict() if isinstance(value, ConfigDict) else value
  return f"config.{name}: {what} (got {shown!r}). {mend}"


def _single_values(config: ConfigDict) -> Iterator[str]:
  for name, allowed in CHOICES.items():
    if get(config, name) not in allowed:
      yield _problem(config, name, "unknown value", f"Use one of {', '.join(allowed)}.")
  for name, least in _AT_LEAST.items():
    value = get(config, name)
    if not (math.isfinite(value) and value >= least):
      yield _problem(config, name, f"must be a finite number of at least {least}", f"Use {least} or more.")
  for name, most in _AT_MOST.items():
    if get(config, name) > most:
      yield _problem(config, name, f"must be at most {most:,}", "Use a smaller number.")
  for name, (with_0, with_1) in _UNIT_INTERVAL.items():
    value = get(config, name)
    if not (0 < value < 1 or (with_0 and value == 0) or (with_1 and value == 1)):
      left, right = "[" if with_0 else "(", "]" if with_1 else ")"
      yield _problem(config, name, f"must lie in {left}0, 1{right}", "Use a fraction such as 0.5.")


def _cross_checks(config: ConfigDict) -> Iterator[str]:
  """Checks of keys against each other, for the parts that this job uses."""
  yield from _paths(config)
  if config.job == "attribute":
    yield from _explained(config)
  elif config.job == "plan":
    yield from _memory(config)
  elif config.job == "retention":
    yield from _haystacks(config)
  elif config.job == "serve":
    yield from _served(config)
  elif config.job == "study":
    yield from _arms(config)
  elif config.job != "export":
    yield from _data_set(config)
    yield from _memory(config)
  by_gradients = config.attribution.gradients > 0 and config.job in ("train", "attribute", "plan")
  if by_gradients and config.attribution.scorer == "exact":
    what = "has no gradient, which config.attribution.gradients asks for"
    yield _problem(config, "attribution.scorer", what, "Use masked or cached.")
  if config.answer.weights != "float":
    yield from _rounded(config)
  if config.job in ("train", "plan"):
    yield from _attribution_problems(config)
    yield from _batch(config)
  if config.job in ("train", "sft") and config.optim.warmup > config.train.steps:
    yield _problem(config, "optim.warmup", f"is longer than config.train.steps={config.train.steps}", "Shorten it.")
  if config.job == "benchmark":
    yield from _benchmarked(config)
  elif config.answer.endpoint.url:
    what = f"can be asked by job 'benchmark' alone, not by {config.job!r}"
    yield _problem(config, "answer.endpoint.url", what, "Use '' and name config.answer.model.")
  if config.job in ("train", "sft", "evaluate", "benchmark", "plan"):
    yield from _lora(config)
  if config.job == "sft":
    yield from _init(config)
    if config.sft.path and not _path(config.sft.path).exists():
      yield _problem(config, "sft.path", "there is no such file or folder", "Correct the path, or use ''.")
    yield from _endpoint(config, "sft.teacher")
    if config.sft.teacher.url and (config.sft.path or config.sft.task != "policy"):
      what = "teaches a policy to write, as config.sft.path would"
      yield _problem(config, "sft.teacher.url", what, "Use sft.task='policy' and sft.path=''.")
    if config.sft.teacher.url and config.sft.teacher.histories <= config.data.holdout:
      what = f"are all held out by config.data.holdout={config.data.holdout}"
      yield _problem(config, "sft.teacher.histories", what, "Use more.")
    if config.sft.path and config.sft.task != "policy":
      yield _problem(config, "sft.path", "teaches a policy to write, not an answer model", "Use sft.task='policy'.")
    if config.train.eval_every and config.sft.task != "policy":
      what = "asks about memories that a policy writes, but the answer model is trained"
      yield _problem(config, "train.eval_every", what, "Use 0.")
    shards = config.mesh.data * config.mesh.fsdp
    if shards > 0 and config.sft.batch % shards:
      what = f"does not split over {shards} devices (data x fsdp)"
      yield _problem(config, "sft.batch", what, f"Use a multiple of {shards}.")


def _rounded(config: ConfigDict) -> Iterator[str]:
  explains = config.job == "train" and config.rl.lambda_ != 0 and config.attribution.unit != "none"
  if explains or config.job == "attribute":
    what = "rounds the weights whose log-probabilities tell what an answer leaned on"
    yield _problem(config, "answer.weights", what, "Use float here; int8 and int4 are for jobs evaluate and benchmark.")
  if importlib.util.find_spec("qwix") is None:
    yield _problem(config, "answer.weights", "needs qwix", "Run: pip install 'attrimem_jax[quantised]'.")


def _paths(config: ConfigDict) -> Iterator[str]:
  if config.policy.checkpoint:
    run = _path(config.policy.checkpoint)
    mend = f"Give {run.parent}." if run.name == "checkpoints" else "Give the --workdir of a run that has trained."
    if not run.is_dir():
      yield _problem(config, "policy.checkpoint", "there is no such run directory", mend)
    elif not (run / "checkpoints").is_dir():
      yield _problem(config, "policy.checkpoint", "that is no run directory, as it holds no folder checkpoints", mend)
  for name in ("policy.model", "answer.model", "answer.retriever.model"):
    value = get(config, name)
    looks_like_path = value.startswith(("/", ".", "~")) or value.endswith(".gguf")
    if looks_like_path and not _path(value).exists():
      yield _problem(
        config, name, "there is no such file or folder", "Give a folder with config.json, or a .gguf file."
      )


def _path(text: str) -> pathlib.Path:
  return pathlib.Path(os.path.expanduser(text))  # pathlib's own expanduser fails where there is no such user


def _data_set(config: ConfigDict) -> Iterator[str]:
  reader = benchmarks.READERS.get(config.data.name)
  known = reader.KINDS if reader else synthetic.KINDS
  for name in ("data.kinds", "reward.kinds"):
    for kind in get(config, name):
      if kind not in known:
        what = f"{kind!r} is no kind of question of this data set"
        yield _problem(config, name, what, f"Choose from {', '.join(known)}.")
  yield from _benchmark(config) if reader else _synthetic(config)


def _synthetic(config: ConfigDict) -> Iterator[str]:
  for name in ("data.split", "eval.split"):
    if get(config, name) in ("all", "sft", "rl"):
      yield _problem(config, name, "synthetic data have no such split", "Use train, eval or test.")
  try:
    world = synthetic.WorldConfig(**config.data.synthetic)
  except (TypeError, ValueError) as error:
    yield _problem(config, "data.synthetic", str(error), "Use pairs such as sessions=(2, 4).")
    return
  if config.rollout.horizon.sessions > world.sessions[1]:
    what = f"no history is that long with config.data.synthetic.sessions={world.sessions}"
    yield _problem(config, "rollout.horizon.sessions", what, "Use 0 for whole histories.")


def _benchmark(config: ConfigDict) -> Iterator[str]:
  name, path = config.data.name, config.data.path or os.environ.get(reading.ENVIRONMENT, "")
  if not path:
    mend = f"Pass --config.data.path=<{name} file> or set {reading.ENVIRONMENT}."
    yield _problem(config, "data.path", f"data set {name!r} needs a file", mend)
  elif not (_path(path).is_file() or (_path(path) / "dataset_info.json").is_file()):
    mend = "Correct the path; python -m attrimem_jax.io.download fetches benchmarks."
    yield _problem(config, "data.path", f"there is no file at {path!r}", mend)
  if config.data.splits:
    if not _path(config.data.splits).is_file():
      yield _problem(config, "data.splits", "there is no such file", "Correct the path, or use ''.")
  else:
    for key in ("data.split", "eval.split"):
      if get(config, key) not in benchmarks.SPLITS:
        what = f"{name} is cut in two by config.data.holdout"
        yield _problem(config, key, what, "Use train, test or all, or name config.data.splits.")
  if config.job == "train" and config.data.split != config.eval.split and config.data.split == "all":
    yield _problem(config, "data.split", "holds the conversations of config.eval.split too", "Train on another split.")
  if not benchmarks.READERS[name].NOTES:
    for key in ("eval.memory", "rollout.horizon.bank"):
      if get(config, key) in ("reference", "teacher"):
        yield _problem(config, key, f"{name} has no reference notes", "Use another.")


def _memory(config: ConfigDict) -> Iterator[str]:
  """The bank, its modules and the room they take in a prompt."""
  known = [str(module) for module in Module]
  modules = list(config.rollout.modules)
  if not modules or len(set(modules)) < len(modules) or not set(modules) <= set(known):
    yield _problem(config, "rollout.modules", "must be different known modules", f"Choose from {', '.join(known)}.")
  if config.answer.retriever.name == "dense" and not config.answer.retriever.model:
    yield _problem(
      config, "answer.retriever.model", "a dense retriever needs an embedding model", "Name one, or use bm25."
    )
  shown = config.rollout.records_budget + config.rollout.core_budget
  if shown >= config.policy.max_prompt:
    what = f"leaves no room for a session beside {shown} tokens of records and core memory"
    yield _problem(config, "policy.max_prompt", what, "Raise it, or lower config.rollout.records_budget.")
  if config.rollout.horizon.sessions == 0 and config.rollout.horizon.bank == "reference":
    what = "a whole history starts from an empty bank"
    yield _problem(config, "rollout.horizon.bank", what, "Use empty, or set config.rollout.horizon.sessions.")


def _served(config: ConfigDict) -> Iterator[str]:
  """The models of the job `serve`."""
  names = list(config.serve.models)
  if not names or len(set(names)) < len(names) or not all(isinstance(name, str) and name for name in names):
    yield _problem(config, "serve.models", "must name different models", "Use for example ('embedded:answer',).")


def _haystacks(config: ConfigDict) -> Iterator[str]:
  """The file of the job `retention`."""
  if not config.data.path or not _path(config.data.path).is_file():
    what = "the job 'retention' needs a LongMemEval file with whole haystacks"
    yield _problem(config, "data.path", what, "Pass --config.data.path=longmemeval_s_cleaned.json.")


def _arms(config: ConfigDict) -> Iterator[str]:
  """The arms of the job `study`, each with the checks of the training run that it stands for."""
  unknown = [name for name in config.study.arms if name not in study.ARMS]
  if unknown or not config.study.arms:
    what = f"there is no arm {', '.join(map(repr, unknown))}" if unknown else "names no arm"
    yield _problem(config, "study.arms", what, f"Choose from {', '.join(study.ARMS)}.")
    return
  if len(set(config.study.arms)) < len(config.study.arms):
    yield _problem(config, "study.arms", "names an arm twice", "Name each once.")
  problems = (p for name in config.study.arms for p in _cross_checks(study.arm_config(config, name, config.seed)))
  yield from dict.fromkeys(problems)


def _benchmarked(config: ConfigDict) -> Iterator[str]:
  """What the job `benchmark` asks, and of whom."""
  if config.eval.questions:
    yield _problem(
      config, "eval.questions", "a benchmark asks all questions", "Use 0; config.data.kinds chooses kinds."
    )
  if config.eval.memories and config.eval.answers:
    yield _problem(config, "eval.answers", "are given, so no memories are asked", "Leave one of the two empty.")
  if config.eval.memories and not (_path(config.eval.memories) / "conversations").is_dir():
    what = "that is no run of the job 'benchmark', as it holds no folder conversations"
    yield _problem(config, "eval.memories", what, "Give the --workdir of one.")
  yield from _endpoint(config, "eval.judge")
  yield from _endpoint(config, "answer.endpoint")
  if config.eval.answers and not _path(config.eval.answers).is_file():
    yield _problem(config, "eval.answers", "there is no such file", "Correct the path.")


def _endpoint(config: ConfigDict, name: str) -> Iterator[str]:
  """A model behind an endpoint, if there is one."""
  endpoint = get(config, name)
  if not endpoint.url:
    return
  if not endpoint.url.startswith(("http://", "https://")):
    yield _problem(config, f"{name}.url", "is no address", "Use for example http://127.0.0.1:8000/v1.")
  if not endpoint.model.strip():
    yield _problem(config, f"{name}.model", "is empty", "Name a model of that endpoint.")
  if endpoint.key_env and not os.environ.get(endpoint.key_env):
    yield _problem(config, f"{name}.key_env", "this environment variable is not set", "Put the key into it, or use ''.")
  if importlib.util.find_spec("openai") is None:
    yield _problem(config, f"{name}.url", "needs the openai package", "pip install 'attrimem-jax[client]'")
  prices = list(endpoint.prices)
  if len(prices) not in (0, 2) or not all(type(p) in (int, float) and 0 <= p < math.inf for p in prices):
    what = "must be two numbers, money for a million tokens of prompts and of replies"
    yield _problem(config, f"{name}.prices", what, "Use for example (0.15, 0.6), or ().")
  try:
    parameters = json.loads(endpoint.parameters)
  except ValueError:
    parameters = None
  if not isinstance(parameters, dict) or RESERVED & parameters.keys():
    what = f"must be a JSON object, without {', '.join(sorted(RESERVED))}"
    yield _problem(config, f"{name}.parameters", what, 'Use for example {"temperature": 0}.')


def _explained(config: ConfigDict) -> Iterator[str]:
  """What the job `attribute` explains: a JSON file, or a text with a question."""
  explain = config.explain
  if bool(explain.path) == bool(explain.context):
    what = "give this or config.explain.context, one of the two"
    yield _problem(
      config, "explain.path", what, "Here goes a JSON file; there a text file, with config.explain.question."
    )
  for name in ("explain.path", "explain.context"):
    if get(config, name) and not _path(get(config, name)).is_file():
      yield _problem(config, name, "there is no such file", "Correct the path.")
  if explain.masks == 1:
    yield _problem(config, "explain.masks", "is too few: one mask tells no source from another", "Use 0, or 2 or more.")
  if explain.context and not explain.question.strip():
    yield _problem(config, "explain.question", "is empty", "Ask something about the text.")


def _attribution_problems(config: ConfigDict) -> Iterator[str]:
  if not _is_schedule(config.attribution.masks):
    what = "must be pairs (from step, masks) that start at step 0, with steps and masks rising and 2 to 65,536 masks"
    yield _problem(config, "attribution.masks", what, "Use for example ((0, 8), (80, 16), (200, 32)).")
  if config.attribution.gate == 1:
    yield _problem(config, "attribution.gate", "cannot rank a single mask", "Use 0, or some 16 masks.")
  if config.attribution.unit == "none" and config.rl.lambda_ > 0:
    what = "weighs a process reward that config.attribution.unit='none' switches off"
    yield _problem(config, "rl.lambda_", what, "Use 0, or choose a unit.")
  if config.rollout.temperature == 0:
    yield _problem(config, "rollout.temperature", "makes all rollouts of a group equal", "Use 1.0 to train.")


def _is_schedule(stages: Any) -> bool:
  """Whether `stages` is like ((0, 8), (80, 16), (200, 32)); it may come from a command line and be anything."""
  pairs = [tuple(stage) if isinstance(stage, (tuple, list)) else () for stage in stages]
  if not pairs or any(len(pair) != 2 or not all(type(value) is int for value in pair) for pair in pairs):
    return False
  steps, masks = zip(*pairs, strict=True)
  rises = all(a < b for values in (steps, masks) for a, b in itertools.pairwise(values))
  return steps[0] == 0 and masks[0] >= 2 and masks[-1] <= _MOST_MASKS and rises


def _batch(config: ConfigDict) -> Iterator[str]:
  """Sessions of a step must split evenly over micro-batches, and a micro-batch over the batch axes of the mesh."""
  prefixes = config.rollout.histories * max(1, config.rollout.horizon.sessions)
  pieces, shards = config.rl.micro_batches, config.mesh.data * config.mesh.fsdp
  if pieces < 1 or shards < 1:
    return  # reported by themselves
  if prefixes % pieces:
    mend = f"Use a divisor of {prefixes}, or change config.rollout.histories."
    yield _problem(config, "rl.micro_batches", f"does not divide the {prefixes} sessions of a step", mend)
  elif (prefixes // pieces) % shards:
    what = (
      f"leaves micro-batches of {prefixes // pieces} sessions, which do not split over {shards} devices (data x fsdp)"
    )
    yield _problem(config, "rl.micro_batches", what, "Lower it, or raise config.rollout.histories.")


def _lora(config: ConfigDict) -> Iterator[str]:
  targets = list(config.lora.targets)
  if len(set(targets)) < len(targets) or not set(targets) <= set(TARGETS):
    mend = f"Choose from {', '.join(TARGETS)}, or use () to train all weights."
    yield _problem(config, "lora.targets", "must be different matrices of a layer", mend)
  if targets and config.optim.name == "muon":
    what = "orthogonalises whole matrices, of which low-rank factors (config.lora.targets) have none"
    yield _problem(config, "optim.name", what, "Use adamw.")
  if targets and config.job == "sft" and config.sft.from_scratch:
    what = "would freeze random weights and train factors beside them (config.lora.targets)"
    yield _problem(config, "sft.from_scratch", what, "Use False, or config.lora.targets=().")


def _hosts(config: ConfigDict) -> Iterator[str]:
  hosts = config.hosts
  if not hosts.coordinator:
    for name, unset in (("processes", 0), ("process", -1)):
      if hosts[name] != unset:
        yield _problem(config, f"hosts.{name}", "is set without config.hosts.coordinator", "Give its host:port.")
    return
  if config.job in ("attribute", "benchmark", "export", "plan", "study", "serve"):
    what = f"job {config.job!r} runs in one process"
    yield _problem(config, "hosts.coordinator", what, "Leave it empty (and $ATTRIMEM_COORDINATOR unset).")
  if hosts.coordinator == "auto":
    return
  if not hosts.coordinator.rpartition(":")[0] or not hosts.coordinator.rpartition(":")[2].isdigit():
    yield _problem(config, "hosts.coordinator", "is no address", "Use host:port, such as 10.0.0.1:1234, or auto.")
  if hosts.processes < 1:
    yield _problem(config, "hosts.processes", "how many processes are there?", "Give their number, on all machines.")
  elif not 0 <= hosts.process < hosts.processes:
    what = f"is not the number of one of {hosts.processes} processes"
    yield _problem(config, "hosts.process", what, f"Use 0 to {hosts.processes - 1}, another one for each process.")


def _mesh(config: ConfigDict, devices: int | None, processes: int) -> Iterator[str]:
  needed = math.prod(config.mesh.values())
  one_is_enough = needed == 1 and processes == 1
  if devices is not None and needed != devices and not one_is_enough:
    where = f" of {processes} processes" if processes > 1 else ""
    what = f"the axes multiply to {needed}, but there are {devices} devices{where}"
    mend = f"Make data x fsdp x tensor equal {devices}" + (", or all 1 to use one." if processes == 1 else ".")
    yield f"config.mesh: {what} (got {dict(config.mesh)}). {mend}"


def _init(config: ConfigDict) -> Iterator[str]:
  init = config.sft.init
  if init.kv_heads > 0 and init.heads % init.kv_heads:
    yield _problem(config, "sft.init.kv_heads", f"does not divide config.sft.init.heads={init.heads}", "Use a divisor.")
  if init.head_size % 2:
    yield _problem(config, "sft.init.head_size", "rotary positions turn pairs of numbers", "Use an even size.")


def get(config: ConfigDict, name: str) -> Any:
  """The value at a dotted name: get(config, "rl.kl")."""
  value = config
  for key in name.split("."):
    value = value[key]
  return value
