"""What a training run would need and cost, before it is paid for: memory per device, tokens, FLOPs, bytes and hours.

The update of the recipe is compiled for its mesh on abstract arrays; no weights are read and no accelerator is needed.
What follows from shapes is exact: bytes of weights, moments, gradients and batch on each device, tokens and FLOPs of
each phase at the lengths of `config.plan`. What is a model says so: activations, time at a stated utilisation.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from attrimem_jax.attribution.ablations import masks_at
from attrimem_jax.io import models
from attrimem_jax.io.metrics import write_json
from attrimem_jax.jobs import setup
from attrimem_jax.jobs.run import Run
from attrimem_jax.nn import decoder, sharding
from attrimem_jax.nn.attention import SCORES
from attrimem_jax.nn.batching import bucket
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.lora import TARGETS, Lora
from attrimem_jax.rl import optimizer as optimizers
from attrimem_jax.rl.loss import LossSettings
from attrimem_jax.rl.update import Batch, make_update

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """One device by its maker's data sheet: dense bfloat16 FLOP/s, bytes/s and bytes of memory."""

  flops: float
  bandwidth: float
  memory: float


ACCELERATORS: Mapping[str, Accelerator] = {
  "H800": Accelerator(989e12, 3.35e12, 80e9),
  "H100": Accelerator(989e12, 3.35e12, 80e9),
  "H200": Accelerator(989e12, 4.8e12, 141e9),
  "A100": Accelerator(312e12, 2.04e12, 80e9),
  "TPU v5p": Accelerator(459e12, 2.765e12, 95e9),
}


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Tokens of a session, of a module's prompt after it, of what is written, of a retrieved context and of an answer."""

  session: int
  prompt: int
  completion: int
  context: int
  answer: int


@dataclasses.dataclass(frozen=True)
class Phase:
  """One phase of a training step, over all devices.

  Attributes:
    tokens: read or written, forward; padding aside.
    flops: of its matrix products and of attention.
    decoded: tokens that are written one after the other, each of which reads all weights again.
    traffic: bytes that these read.
  """

  name: str
  tokens: float
  flops: float
  decoded: int = 0
  traffic: float = 0.0

  def seconds(self, device: Accelerator, devices: int, utilisation: float) -> float:
    """Compute at `utilisation` of the peak, decoding at that of the bandwidth, whichever is longer."""
    return max(self.flops / device.flops, self.traffic / device.bandwidth) / devices / utilisation


def lengths(config: ConfigDict) -> Lengths:
  """The lengths that a plan assumes: those of `config.plan`, and where that is 0 the most that the recipe allows."""
  plan, rollout = config.plan, config.rollout
  prompt = plan.prompt or rollout.records_budget + rollout.core_budget
  return Lengths(
    session=plan.session or config.policy.max_prompt - prompt,
    prompt=prompt,
    completion=plan.completion or rollout.max_new_tokens,
    context=plan.context or config.answer.max_context,
    answer=plan.answer or config.answer.max_new_tokens,
  )


def forward(shape: DecoderConfig, tokens: float, keys: float, scored: float = 0) -> float:
  """FLOPs of reading `tokens` that each see `keys` on average, with the head on `scored` of them."""
  layer = shape.width * shape.head_size * 2 * (shape.heads + shape.kv_heads) + 3 * shape.width * shape.hidden
  attention = 2 * keys * shape.heads * shape.head_size
  return 2 * (tokens * shape.layers * (layer + attention) + scored * shape.width * shape.vocab_size)


def phases(
  config: ConfigDict, policy: DecoderConfig, answer: DecoderConfig, step: int = 0, shared: bool = True
) -> list[Phase]:
  """The phases of training step `step`; unless `shared`, every rollout of every module reads its session for itself."""
  size, rollout = lengths(config), config.rollout
  sessions = max(1, rollout.horizon.sessions)
  calls = rollout.histories * sessions * len(rollout.modules) * rollout.group_size
  prefixes = rollout.histories * sessions if shared else calls
  asked = rollout.histories * rollout.group_size * config.reward.questions
  return [
    _write(config, policy, size, prefixes, calls, sessions),
    _answer(config, answer, size, asked),
    _score(config, answer, size, asked, step),
    _update(config, policy, size, prefixes, calls),
  ]


def _write(config, shape, size: Lengths, prefixes: int, calls: int, sessions: int) -> Phase:
  read = forward(shape, prefixes * size.session, size.session / 2)
  read += forward(shape, calls * size.prompt, size.session + size.prompt / 2)
  seen = size.session + size.prompt + size.completion / 2
  written = forward(shape, calls * size.completion, seen, calls * size.completion)
  steps = sessions * size.completion
  each = jnp.dtype(config.policy.dtype).itemsize
  # Every token of a row reads the weights once, together with all other rows, and its own keys and values.
  own = calls / sessions * (size.prompt + size.completion / 2) + prefixes / sessions * size.session
  factors = _factors(setup.lora_of(config), shape)
  traffic = steps * each * (parameters(shape) + factors + own * _cache_size(shape))
  tokens = prefixes * size.session + calls * (size.prompt + size.completion)
  return Phase("write", tokens, read + written + 2 * tokens * factors, steps, traffic)


def _answer(config, shape, size: Lengths, asked: int) -> Phase:
  read = forward(shape, asked * size.context, size.context / 2)
  written = forward(shape, asked * size.answer, size.context + size.answer / 2, asked * size.answer)
  each = jnp.dtype(config.answer.dtype).itemsize
  traffic = size.answer * each * (parameters(shape) + asked * (size.context + size.answer / 2) * _cache_size(shape))
  return Phase("answer", asked * (size.context + size.answer), read + written, size.answer, traffic)


def _score(config, shape, size: Lengths, asked: int, step: int) -> Phase:
  """Every answer after every ablated context; a gradient counts three times."""
  attribution = config.attribution
  if config.rl.lambda_ == 0 or attribution.unit == "none":
    return Phase("score", 0, 0)
  rows = 3 * attribution.gradients or masks_at(step, attribution.masks)
  if attribution.scorer == "cached":
    once, again, keys = size.context, size.answer, size.context * attribution.keep
  else:
    again = size.context * (attribution.keep if attribution.scorer == "exact" else 1) + size.answer
    once, keys = 0, again / 2
  flops = forward(shape, asked * once, size.context / 2)
  flops += forward(shape, asked * rows * again, keys, asked * rows * size.answer)
  gate = attribution.gate * asked
  if gate:
    kept = size.context * attribution.keep + size.answer
    flops += forward(shape, gate * kept, kept / 2, gate * size.answer)
    return Phase("score", asked * (once + rows * again) + gate * kept, flops)
  return Phase("score", asked * (once + rows * again), flops)


def _update(config, shape, size: Lengths, prefixes: int, calls: int) -> Phase:
  """Forward and backward of the policy, forward again with `rl.remat`, and forward of the reference."""
  suffix = size.prompt + size.completion
  once = forward(shape, prefixes * size.session, size.session / 2)
  once += forward(shape, calls * suffix, size.session + suffix / 2, calls * size.completion)
  passes, tokens = 3 + bool(config.rl.remat) + bool(config.rl.kl), prefixes * size.session + calls * suffix
  lora = setup.lora_of(config)
  if lora is None:
    return Phase("update", tokens, passes * once)
  # Whole matrices, embedding and head have no gradient; the factors are read and differentiated beside them.
  spared = forward(shape, tokens, 0, calls * size.completion)
  factors = 2 * tokens * _factors(lora, shape) * (passes - bool(config.rl.kl))
  return Phase("update", tokens, passes * once - spared + factors)


def attributed(config: ConfigDict, scorer: str, gradients: int) -> ConfigDict:
  """The recipe with another attribution; `exact` and 0 gradients are the published one."""
  config = config.copy_and_resolve_references()
  config.attribution.update({"scorer": scorer, "gradients": gradients, "gate": 0})
  return config


def parameters(shape: DecoderConfig) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder.abstract(shape)))


def _factors(lora: Lora | None, shape: DecoderConfig) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(lora.abstract(shape))) if lora else 0


def _cache_size(shape: DecoderConfig) -> int:
  """Numbers that one token leaves in the cache."""
  return 2 * shape.layers * shape.kv_heads * shape.head_size


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The update on its mesh.

  Attributes:
    arguments: bytes of its arguments on a device: weights, moments, reference and batch. Exact.
    temporary: bytes of its intermediate arrays as a CPU would run it: a trend, no measure.
  """

  arguments: int
  temporary: int


def compile_update(config: ConfigDict, shape: DecoderConfig, mesh: Mesh) -> Compiled:
  """Compiles the update of a recipe for a mesh, at the lengths of the plan."""
  optimizer = optimizers.make_optimizer(setup.optimizer_settings(config))
  settings = LossSettings(kl_coefficient=config.rl.kl, normalisation=config.rl.loss_norm)
  lora = setup.lora_of(config)
  update = make_update(shape, optimizer, settings, setup.logprobs(config, shape), lora)
  params = decoder.abstract(shape)
  trained = lora.abstract(shape) if lora else params
  state = _placed(jax.eval_shape(lambda p: optimizers.init_state(optimizer, p), trained), mesh)
  reference = _placed(params, mesh) if config.rl.kl or lora else None
  batch = _split(_batch(config), mesh)
  memory = update.lower(state, reference, batch).compile().memory_analysis()
  assert memory is not None, "the CPU backend analyses memory"
  return Compiled(memory.argument_size_in_bytes, memory.temp_size_in_bytes)


def _batch(config: ConfigDict) -> Batch:
  """The shapes of a training batch [A, P / A, …]."""
  size, rollout, step = lengths(config), config.rollout, config.rollout.bucket
  micro = config.rl.micro_batches
  prefixes = rollout.histories * max(1, rollout.horizon.sessions) // micro
  rows, width = len(rollout.modules) * rollout.group_size, setup.completion_width(config, size.completion)
  ids, mask = jnp.int32, jnp.bool_
  prefix, suffix = bucket(size.session, step), bucket(size.prompt, step) + width

  def array(dtype, *shape):
    return jax.ShapeDtypeStruct((micro, prefixes, *shape), dtype)

  shared = decoder.Shared(array(ids, prefix), array(mask, prefix), array(ids, rows, suffix), array(mask, rows, suffix))
  tokens = (rows, width)
  return Batch(shared, array(mask, *tokens), array(jnp.float32, *tokens), None, array(jnp.float32, *tokens))


def _placed(tree, mesh: Mesh):
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
    tree,
    sharding.shardings(tree, mesh),
  )


def _split(batch: Batch, mesh: Mesh) -> Batch:
  ways = mesh.shape["data"] * mesh.shape["fsdp"]

  def one(leaf):
    spec = P(None, ("data", "fsdp")) if leaf.shape[1] % ways == 0 else P()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

  return jax.tree.map(one, batch)


def bytes_on_a_device(tree, mesh: Mesh) -> int:
  """Exact bytes of a tree of (abstract) parameters or moments on each device of a mesh."""
  shards = zip(jax.tree.leaves(tree), jax.tree.leaves(sharding.shardings(tree, mesh)), strict=True)
  return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in shards)


def memory(config: ConfigDict, policy: DecoderConfig, answer: DecoderConfig, mesh: Mesh) -> dict[str, int]:
  """Bytes on each device by what holds them. All but the last three are exact."""
  params = decoder.abstract(policy)
  optimizer = optimizers.make_optimizer(setup.optimizer_settings(config))
  lora = setup.lora_of(config)
  trained = lora.abstract(policy) if lora else params
  found = {"weights": bytes_on_a_device(params, mesh)}
  gradients = bytes_on_a_device(trained, mesh)
  if lora:
    found["low-rank factors"] = gradients
  found |= {
    "moments": bytes_on_a_device(jax.eval_shape(optimizer.init, trained), mesh),
    "gradients": gradients,
  }
  if config.rl.kl and not lora:  # the frozen weights beside the factors are the reference
    found["reference"] = found["weights"]
  frozen = bool(config.rl.kl or lora)
  if config.answer.model != config.policy.model or config.policy.checkpoint or not frozen:
    found["answer model"] = bytes_on_a_device(decoder.abstract(answer), mesh)
  return found | dict(_activations(config, policy, mesh))


def _activations(config: ConfigDict, shape: DecoderConfig, mesh: Mesh) -> Iterator[tuple[str, int]]:
  """Models of what one micro-batch keeps for the backward pass, and of its largest array."""
  batch = _batch(config)
  ways = mesh.shape["data"] * mesh.shape["fsdp"]
  prefixes = batch.shared.prefix.shape[1]
  prefixes = prefixes // ways if prefixes % ways == 0 else prefixes
  rows, suffix = batch.shared.suffix.shape[2:]
  prefix = batch.shared.prefix.shape[-1]
  each = jnp.dtype(config.policy.dtype).itemsize
  tokens = prefixes * (prefix + rows * suffix)
  heads = -(-shape.heads // mesh.shape["tensor"])
  together = prefixes * heads * max(rows * suffix * (prefix + suffix), prefix * prefix)
  scores = 4 * min(together, max(SCORES // mesh.size, prefixes * heads * rows * (prefix + suffix)))
  kept = shape.width if config.rl.remat else 8 * shape.width + 4 * shape.hidden // mesh.shape["tensor"]
  yield "activations (model)", shape.layers * tokens * kept * each
  yield "largest array: attention scores (model)", scores
  yield "keys and values while writing (model)", _caches(config, shape, mesh)


def _caches(config: ConfigDict, shape: DecoderConfig, mesh: Mesh) -> int:
  """Of the sessions that are read at a time and of the calls under way, at their full length."""
  size, rollout = lengths(config), config.rollout
  calls = len(rollout.modules) * rollout.group_size
  calls = min(calls, max(1, rollout.at_once // rollout.histories)) if rollout.at_once else calls
  tokens = rollout.histories * (size.session + calls * (size.prompt + size.completion))
  ways = sharding.batch_ways(mesh)
  split = ways if rollout.histories % ways == 0 or calls % ways == 0 else 1
  heads = mesh.shape["tensor"] if shape.kv_heads % mesh.shape["tensor"] == 0 else 1
  return tokens * _cache_size(shape) * jnp.dtype(config.policy.dtype).itemsize // (split * heads)


def needed(held: Mapping[str, int]) -> int:
  """Bytes on a device at once: what is always there, and the more of what updates and what writing take."""
  update = ("gradients", "activations (model)", "largest array: attention scores (model)")
  write = ("keys and values while writing (model)",)
  always = sum(count for name, count in held.items() if name not in update + write)
  return always + max(sum(held[name] for name in names) for names in (update, write))


def run_plan(config: ConfigDict, run: Run) -> None:
  """Job `plan`: prints the plan and writes it to <workdir>/plan.json."""
  policy, answer = models.shape(config.policy.model), models.shape(config.answer.model)
  mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
  held = memory(config, policy, answer, mesh)
  print(f"compiling the update for {mesh.size} devices …", flush=True)
  compiled = compile_update(config, policy, mesh)
  stages = _stages(config)
  found = {
    "lengths": dataclasses.asdict(lengths(config)),
    "parameters": {"policy": parameters(policy), "answer": parameters(answer)},
    "devices": mesh.size,
    "bytes_on_a_device": held,
    "compiled": dataclasses.asdict(compiled),
    "phases": {first: [dataclasses.asdict(p) for p in phases(config, policy, answer, first)] for first, _ in stages},
    "hours": {name: hours(config, policy, answer, mesh.size, device) for name, device in ACCELERATORS.items()},
    "hours_as_published": {
      name: hours(attributed(config, "exact", 0), policy, answer, mesh.size, device, shared=False)
      for name, device in ACCELERATORS.items()
    },
    "hours_with_gradients": {
      f"{scorer}, {count}": {
        name: hours(attributed(config, scorer, count), policy, answer, mesh.size, device)
        for name, device in ACCELERATORS.items()
      }
      for scorer in ("masked", "cached")
      for count in (1, 5)
    },
  }
  run.workdir.mkdir(parents=True, exist_ok=True)
  write_json(run.workdir / "plan.json", json.loads(json.dumps(found)))
  print("\n".join(_lines(config, found, stages, phases(config, policy, answer, stages[-1][0]))), flush=True)
  print(f"all numbers: {run.workdir / 'plan.json'}", flush=True)


def _stages(config: ConfigDict) -> list[tuple[int, int]]:
  """(first step, steps) of each stage of the mask schedule that the run reaches."""
  starts = [first for first, _ in config.attribution.masks if first < max(1, config.train.steps)]
  return [(a, b - a) for a, b in zip(starts, [*starts[1:], config.train.steps], strict=True)]


def hours(
  config: ConfigDict,
  policy: DecoderConfig,
  answer: DecoderConfig,
  devices: int,
  device: Accelerator,
  shared: bool = True,
) -> float:
  """Of the whole run, evaluations aside."""
  rate = config.plan.utilisation
  seconds = (
    steps * sum(phase.seconds(device, devices, rate) for phase in phases(config, policy, answer, first, shared))
    for first, steps in _stages(config)
  )
  return sum(seconds) / 3600


def _lines(config: ConfigDict, found: dict, stages: list[tuple[int, int]], last: list[Phase]) -> Iterator[str]:
  size = found["lengths"]
  yield (
    f"\n{found['parameters']['policy'] / 1e9:.3f} B parameters on {found['devices']} devices; tokens assumed: session "
    f"{size['session']:,}, prompt {size['prompt']:,}, written {size['completion']:,}, context {size['context']:,}, "
    f"answer {size['answer']:,} (config.plan)"
  )
  yield "\nmemory of a device, exact but for what is called a model:"
  total = needed(found["bytes_on_a_device"])
  yield from (f"  {name:<52} {count / _GIB:9.2f} GiB" for name, count in found["bytes_on_a_device"].items())
  yield f"  {'at once: nothing is written during an update':<52} {total / _GIB:9.2f} GiB"
  compiled = found["compiled"]
  yield (
    f"  compiled: arguments {compiled['arguments'] / _GIB:.2f} GiB (weights, moments, reference, batch; exact), "
    f"temporary {compiled['temporary'] / _GIB:.2f} GiB (as a CPU would run it: a trend)"
  )
  yield f"\na step from step {stages[-1][0]} on:       tokens        TFLOP   decoded in a row   GB read for these"
  for phase in last:
    figures = f"{phase.tokens:>14,.0f} {phase.flops / 1e12:>12,.1f} {phase.decoded:>18,} {phase.traffic / 1e9:>19,.0f}"
    yield f"  {phase.name:<22} {figures}"
  rate, devices = config.plan.utilisation, found["devices"]
  yield f"\n{config.train.steps} steps at {rate:.0%} of peak rate and bandwidth (a model):"
  yield f"  {'':<8} {'hours':>10} {'device hours':>14} {'as published*':>15}"
  for name, count in found["hours"].items():
    room = ACCELERATORS[name].memory - total
    fits = "fits" if room > 0 else f"short of {-room / _GIB:.1f} GiB"
    published = found["hours_as_published"][name]
    yield f"  {name:<8} {count:10,.1f} {count * devices:14,.1f} {published * devices:15,.1f}   {fits}"
  yield "  * device hours when nothing is shared and every answer is scored anew after each mask"
  yield from _cheaper(config, found)
  yield from _advice(config, found, total)


def _cheaper(config: ConfigDict, found: dict) -> Iterator[str]:
  """Attributions that cost less than the one of the recipe."""
  cheaper = {
    n: each["H800"] for n, each in found["hours_with_gradients"].items() if each["H800"] < found["hours"]["H800"]
  }
  if cheaper and config.rl.lambda_ and config.attribution.unit != "none":
    yield "\nwith gradients in place of masks (config.attribution.scorer, config.attribution.gradients):"
    yield from (f"  {name:<12} {count * found['devices']:10,.1f} H800 hours" for name, count in cheaper.items())


def _advice(config: ConfigDict, found: dict, total: int) -> Iterator[str]:
  if all(total < device.memory for device in ACCELERATORS.values()):
    return
  held, micro = found["bytes_on_a_device"], config.rl.micro_batches
  yield "\nto make it fit:"
  if not config.rl.remat:
    yield "  config.rl.remat=True computes activations again in the backward pass"
  prefixes = config.rollout.histories * max(1, config.rollout.horizon.sessions)
  shards = config.mesh.data * config.mesh.fsdp
  if prefixes // micro > shards:
    yield f"  config.rl.micro_batches up to {prefixes // shards} splits activations (now {micro})"
  if held["activations (model)"] > total / 4:
    yield "  shorter sessions (config.policy.overlong=split) or completions: activations grow with them"
  if held["keys and values while writing (model)"] > total / 4:
    yield "  config.rollout.at_once bounds the calls that are sampled together: keys and values grow with them"
  if held["weights"] + held["moments"] > total / 4:
    yield "  more devices along config.mesh.fsdp split weights and moments"
    if not config.lora.targets:
      targets = ",".join(map(repr, TARGETS))
      yield f'  --config.lora.targets="({targets})" leaves moments and gradients of low-rank factors alone'
