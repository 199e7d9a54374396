"""What a training step costs as one size after the other grows: see bench_scaling.sh.

A random Qwen3 of 4.2 M parameters, float32. The base is one session of 512 tokens with 16 completions of 64; an answer of
16 tokens after a context of 256 under 16 masks. Each curve changes one size. Costs are relative to the base, seconds are
medians without the first round, and beside them stand the FLOPs that the job `plan` counts. Where a prefix is repeated
for every completion, as other trainers do it, the same update is timed too. Virtual devices share this machine's cores,
so over devices only what one of them computes and holds is told, by XLA's own count.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator

import numpy as np

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 4096, 256, 4, 8, 4, 32
BASE = {"prefix": 512, "rows": 16, "sessions": 1, "width": WIDTH, "masks": 16}
NEW, CONTEXT, ANSWER = 64, 256, 16
CURVES = {
  "prefix": (128, 256, 512, 1024, 2048),
  "rows": (2, 4, 8, 16, 32),
  "sessions": (1, 2, 4, 8),
  "width": (128, 256, 512),
  "masks": (8, 16, 32, 64),
}
LABELS = {
  "prefix": "tokens of the session",
  "rows": "completions per session",
  "sessions": "sessions",
  "width": "width of the network",
  "masks": "masks per answer",
}


def shape(width: int):
  from attrimem_jax.nn.config import DecoderConfig

  heads = width * HEADS // WIDTH
  return DecoderConfig(VOCAB, width, LAYERS, heads, heads // 2, HEAD_SIZE, 3 * width, qk_norm=True, max_positions=8192)


def batch_of(size: dict[str, int], shared: bool = True):
  """The update's batch; unless `shared`, every completion has a prefix of its own."""
  from attrimem_jax.nn.batching import pack
  from attrimem_jax.rl.update import Batch

  rng = np.random.default_rng(0)
  prefixes = rng.integers(3, VOCAB, (size["sessions"], size["prefix"])).tolist()
  suffixes = rng.integers(3, VOCAB, (size["sessions"], size["rows"], NEW + 1))
  rows = [[(s[:1].tolist(), s[1:].tolist()) for s in group] for group in suffixes]
  if not shared:
    prefixes = [p for p in prefixes for _ in range(size["rows"])]
    rows = [[row] for group in rows for row in group]
  packed = pack(prefixes, rows, prompt_width=1, completion_width=NEW)
  tokens = (*packed.suffix.shape[:2], NEW)
  spread = np.linspace(-1, 1, size["sessions"] * size["rows"], dtype=np.float32).reshape(*tokens[:2], 1)
  return Batch(packed, np.ones(tokens, bool), np.ascontiguousarray(np.broadcast_to(spread, tokens)))


def trainer(width: int):
  """(update, state) of a random network."""
  import jax

  from attrimem_jax.nn import decoder
  from attrimem_jax.rl import optimizer as optimizers
  from attrimem_jax.rl.loss import LossSettings
  from attrimem_jax.rl.update import make_update

  config = shape(width)
  optimizer = optimizers.make_optimizer(optimizers.OptimizerSettings(learning_rate=1e-6))
  state = optimizers.init_state(optimizer, decoder.init(config, jax.random.key(0)))
  return make_update(config, optimizer, LossSettings(kl_coefficient=0.0)), state


def median(action: Callable[[], object], repeats: int) -> float:
  taken = []
  for _ in range(repeats + 1):
    start = time.perf_counter()
    action()
    taken.append(time.perf_counter() - start)
  return float(np.median(taken[1:]))


def update_seconds(size: dict[str, int], shared: bool, repeats: int) -> float:
  import jax

  update, state = trainer(size["width"])
  batch, held = batch_of(size, shared), [state]

  def once():
    held[0], metrics = update(held[0], None, batch)
    jax.block_until_ready(metrics)

  return median(once, repeats)


def update_flops(size: dict[str, int], shared: bool) -> float:
  from attrimem_jax.jobs import plan

  config, rows = shape(size["width"]), size["sessions"] * size["rows"]
  read = size["sessions"] * size["prefix"] * (1 if shared else size["rows"])
  once = plan.forward(config, read, size["prefix"] / 2)
  return 3 * (once + plan.forward(config, rows * (NEW + 1), size["prefix"] + NEW / 2, rows * NEW))


def score_seconds(masks: int, scorer: str, repeats: int) -> float:
  import jax

  from attrimem_jax.attribution.attribute import Problem, measure
  from attrimem_jax.nn import decoder
  from attrimem_jax.memory.context import Source

  config, rng = shape(WIDTH), np.random.default_rng(0)
  model = types.SimpleNamespace(
    name="random", config=config, params=decoder.init(config, jax.random.key(0)), tokenizer=None
  )
  ids = rng.integers(3, VOCAB, CONTEXT).astype(np.int32)
  owner = CallKey("h", 0, 0, Module.SEMANTIC)
  sources = tuple(Source(owner, i) for i in range(CONTEXT // 4))
  source = np.repeat(np.arange(len(sources)), 4).astype(np.int32)
  problems = [
    Problem(ids, source, sources, rng.integers(3, VOCAB, ANSWER).astype(np.int32), (0, i)) for i in range(4)
  ]
  return median(lambda: measure(model, [5], problems, masks, scorer=scorer), repeats)


def on_devices(count: int) -> dict[str, float]:
  """FLOPs and bytes of one of so many virtual devices, by XLA's count, in a process of its own."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
  done = subprocess.run(
    [sys.executable, __file__, "--device-worker", str(count)],
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])


def device_worker(count: int) -> None:
  import jax

  from attrimem_jax.nn import sharding

  mesh = sharding.make_mesh(fsdp=count)
  update, state = trainer(WIDTH)
  state = jax.tree.map(lambda leaf: leaf, state)
  batch = jax.tree.map(lambda leaf: leaf[None], batch_of(BASE | {"sessions": 8}))
  state = dataclass_placed(state, mesh)
  compiled = update.lower(state, None, sharding.place_batch(batch, mesh)).compile()
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
  print(json.dumps({"flops": cost["flops"], "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes}))


def dataclass_placed(state, mesh):
  from attrimem_jax.nn import sharding

  return sharding.place(state, mesh)


def curves(repeats: int) -> Iterator[tuple[str, dict[str, list[tuple[float, float]]]]]:
  """(what grows, {curve: [(size, cost relative to the base)]}), one after the other as they are measured."""
  base = update_seconds(BASE, True, repeats)
  flops = update_flops(BASE, True)
  for name in ("prefix", "rows", "sessions", "width"):
    found: dict[str, list[tuple[float, float]]] = {"seconds": [], "FLOPs": [], "seconds, nothing shared": []}
    for size in CURVES[name]:
      sizes = BASE | {name: size}
      found["seconds"].append((size, update_seconds(sizes, True, repeats) / base))
      found["FLOPs"].append((size, update_flops(sizes, True) / flops))
      if name in ("prefix", "rows") and size * BASE["rows" if name == "prefix" else "prefix"] <= 2**14:
        found["seconds, nothing shared"].append((size, update_seconds(sizes, False, repeats) / base))
    yield name, {curve: points for curve, points in found.items() if points}
  exact = {scorer: [score_seconds(m, scorer, repeats) for m in CURVES["masks"]] for scorer in ("exact", "cached")}
  first = exact["exact"][CURVES["masks"].index(BASE["masks"])]
  yield "masks", {f"seconds, {s}": list(zip(CURVES["masks"], np.array(v) / first, strict=True)) for s, v in exact.items()}
  devices = {count: on_devices(count) for count in (1, 2, 4, 8)}
  yield "devices", {
    f"{what} of a device": [(count, each[what] / devices[1][what]) for count, each in devices.items()]
    for what in ("flops", "bytes")
  }


def draw(found: dict[str, dict[str, list[tuple[float, float]]]], path: pathlib.Path) -> None:
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained")
  for axis, (name, lines) in zip(axes.flat, found.items(), strict=True):
    for (label, points), style in zip(lines.items(), ("o-", "x--", "s:"), strict=False):
      axis.plot(*zip(*points, strict=True), style, color="black", label=label, markersize=5, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel=LABELS.get(name, name))
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axis.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axis.minorticks_off()
    marks = [m for m in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32) if axis.get_ylim()[0] <= m <= axis.get_ylim()[1]]
    axis.set_yticks(marks, [f"{m:g}" for m in marks])
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
  for axis in axes[:, 0]:
    axis.set_ylabel("cost, relative to the base")
  figure.savefig(path, dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/scaling"), help="folder of the results")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--device-worker", type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.device_worker:
    device_worker(args.device_worker)
    return
  args.out.mkdir(parents=True, exist_ok=True)
  found = {}
  for name, lines in curves(args.repeats):
    found[name] = lines
    print(LABELS.get(name, name), flush=True)
    for label, points in lines.items():
      print(f"  {label:<24} " + "  ".join(f"{x:>5,}: {y:5.2f}" for x, y in points), flush=True)
  (args.out / "scaling.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
  draw(found, args.out / "scaling.png")
  print(f"numbers and picture: {args.out / 'scaling.json'}, {args.out / 'scaling.png'}")


if __name__ == "__main__":
  main()
