"""Times generation, the GRPO update and a whole step against peers, alternating in one run: see the bench_*.sh beside.

generate  SmolLM2-135M, float32, prompts of 256 tokens, 64 new ones, against transformers' generate: eight prompts, and
          one prompt with eight samples; and how far decoding is from what reading weights and keys takes alone.
update    a random Qwen3 of 4.2 M parameters, one prefix of 1,024 tokens and 32 completions of 64, against TRL's
          GRPOTrainer (same weights and tokens; the norms of the gradients are compared) and tunix, both of which read
          the prefix once for every completion.
step      the same network, a prompt of 128 tokens, eight samples of 64 tokens each and the update on them.

A peer runs in a process of its own environment (this file with `--worker`) and takes turns with this project. All
sizes can be changed, to draw cost against them. Seconds are medians without the first round, which compiles.
"""

import argparse
import pathlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import peers

if TYPE_CHECKING:
  from attrimem_jax.rl.update import Batch

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 4096, 256, 4, 8, 4, 32
THETA, RATE = 1e6, 1e-6


def advantages(rows: int) -> np.ndarray:
  """Of whole completions, with mean 0."""
  return np.linspace(-1, 1, rows, dtype=np.float32)


# --- peers, in their own environments -------------------------------------------------------------------------------


def transformers_worker(folder: str) -> None:
  import torch
  from transformers import AutoModelForCausalLM

  torch.set_num_threads(2)
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  def generate(prompts: list[list[int]], samples: int, new: int, greedy: bool) -> dict:
    ids = torch.tensor(prompts)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    start = time.perf_counter()
    with torch.no_grad():
      out = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_return_sequences=samples, max_new_tokens=new, min_new_tokens=new,
        pad_token_id=0, **how,
      )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "ids": out[:, ids.shape[1] :].tolist()}

  peers.serve(generate)


def trl_worker(folder: str) -> None:
  """Makes the network too, and leaves it in `folder`."""
  import tempfile
  import warnings

  warnings.filterwarnings("ignore")
  import torch
  from datasets import Dataset
  from tokenizers import Tokenizer, models, pre_tokenizers
  from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
  from trl import GRPOConfig, GRPOTrainer

  torch.set_num_threads(2)
  torch.manual_seed(0)
  shape = Qwen3Config(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_SIZE, max_position_embeddings=8192,
    tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None, rope_theta=THETA,
  )  # fmt: skip
  Qwen3ForCausalLM(shape).save_pretrained(folder)
  words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
  tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
  )

  def trainer(rows: int, prompt: list[int], new: int, steps: int, callbacks=()) -> GRPOTrainer:
    settings = GRPOConfig(
      output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, per_device_train_batch_size=rows, num_generations=rows,
      max_completion_length=new, max_steps=steps, learning_rate=RATE, beta=0.0, temperature=1.0, report_to=[],
      save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
      generation_kwargs={"min_new_tokens": new}, seed=0,
    )  # fmt: skip
    return GRPOTrainer(
      model=Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32),
      reward_funcs=lambda completion_ids, **_: [float(np.mean(np.array(ids) % 2)) for ids in completion_ids],
      args=settings, processing_class=tokenizer, callbacks=list(callbacks),
      train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{i}" for i in prompt)}] * 8),
    )  # fmt: skip

  prepared: dict[str, GRPOTrainer] = {}

  def answer(what: str, prompt: list[int], completions: list[list[int]], rows: int, new: int) -> dict:
    if what == "step":
      taken: list[float] = []

      class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
          taken.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
          taken[-1] = time.perf_counter() - taken[-1]

      trainer(rows, prompt, new, 3, [Clock()]).train()
      return {"seconds": float(np.median(taken[1:]))}
    if what not in prepared:
      prepared[what] = trainer(rows, prompt, new, 1)
      prepared[what].create_optimizer()
      prepared[what].current_gradient_accumulation_steps = 1
    one, ids = prepared[what], torch.tensor(completions)
    inputs = {
      "prompt_ids": torch.tensor([prompt] * rows),
      "prompt_mask": torch.ones(rows, len(prompt), dtype=torch.long),
      "completion_ids": ids,
      "completion_mask": torch.ones_like(ids),
      "advantages": torch.tensor(advantages(rows)),
      "num_items_in_batch": torch.tensor(ids.numel()),
    }
    one.model.train()
    start = time.perf_counter()
    one.optimizer.zero_grad()
    one._compute_loss(one.model, inputs).backward()
    norm = torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
    one.optimizer.step()
    return {"seconds": time.perf_counter() - start, "grad_norm": float(norm)}

  peers.serve(answer)


def tunix_worker(_: str) -> None:
  import warnings

  warnings.filterwarnings("ignore")
  import jax
  import jax.numpy as jnp
  import optax
  from flax import nnx
  from grain import python as grain
  from tunix.models.qwen3 import model as qwen3
  from tunix.rl import rl_cluster
  from tunix.rl.grpo import grpo_learner
  from tunix.rl.rollout import base_rollout

  class Words:
    def encode(self, text, **_):
      return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_):
      return " ".join(f"w{int(i)}" for i in ids)

    def bos_id(self):
      return 2

    def eos_id(self):
      return 1

    def pad_id(self):
      return 0

  mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,) * 2)
  shape = qwen3.ModelConfig(
    num_layers=LAYERS, vocab_size=VOCAB, embed_dim=WIDTH, hidden_dim=3 * WIDTH, num_heads=HEADS, head_dim=HEAD_SIZE,
    num_kv_heads=KV_HEADS, norm_eps=1e-6, rope_theta=int(THETA), use_tied_embedding=True,
  )  # fmt: skip
  roles = rl_cluster.Role

  def learner(rows: int, prompt: int, new: int, steps: int, pieces: int = 1):
    with mesh:
      model = qwen3.Qwen3(shape, rngs=nnx.Rngs(0))
    settings = rl_cluster.ClusterConfig(
      role_to_mesh={roles.ACTOR: mesh, roles.REFERENCE: mesh, roles.ROLLOUT: mesh}, rollout_engine="vanilla",
      offload_to_cpu=False,
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE)), eval_every_n_steps=10**6,
        max_steps=steps, mini_batch_size=pieces, train_micro_batch_size=1,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=new, max_prompt_length=prompt, kv_cache_size=prompt + new + 1, temperature=1.0,
        top_p=1.0, top_k=None,
      ),
    )  # fmt: skip
    cluster = rl_cluster.RLCluster(actor=model, reference=None, tokenizer=Words(), cluster_config=settings)
    found = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      reward_fns=lambda prompts, completions, **_: [
        float(np.mean([int(word[1:]) % 2 for word in one.split()] or [0])) for one in completions
      ],
      algo_config=grpo_learner.GRPOConfig(num_generations=rows, num_iterations=1, beta=0.0, epsilon=0.2),
    )
    return model, cluster, found

  prepared: dict[str, tuple] = {}
  few = 8  # rows at a time: 32 of 1,088 tokens take more than 16 GB

  def answer(what: str, prompt: list[int], completions: list[list[int]], rows: int, new: int) -> dict:
    if what == "step":
      steps = 4
      model, cluster, one = learner(rows, len(prompt), new, steps)
      ends: list[float] = []
      update = cluster.update_actor

      def timed(*args, **kwargs):
        update(*args, **kwargs)
        jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
        ends.append(time.perf_counter())

      cluster.update_actor = timed
      # Its sampler puts a token of its own before the prompt.
      texts = [" ".join(f"w{i}" for i in prompt[1:])] * (steps + 1)
      with mesh:
        one.train(grain.MapDataset.source(texts).batch(1).map(lambda text: {"prompts": text}), None)
      return {"seconds": float(np.median(np.diff(ends)[1:]))}
    if what not in prepared:
      prepared[what] = learner(rows, len(prompt), new, 10**6, -(-rows // few))
    model, cluster, _ = prepared[what]
    ids, spread = jnp.array(completions, jnp.int32), jnp.array(advantages(rows))
    examples = [
      grpo_learner.TrainExample(
        prompt_ids=jnp.array([prompt] * few, jnp.int32),
        prompt_mask=jnp.ones((few, len(prompt)), bool),
        completion_ids=ids[i : i + few],
        completion_mask=jnp.ones((few, new), bool),
        advantages=spread[i : i + few],
        ref_per_token_logps=None,
        old_per_token_logps=None,
      )
      for i in range(0, rows, few)
    ]
    start = time.perf_counter()
    with mesh:
      cluster.update_actor(examples, None)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
    return {"seconds": time.perf_counter() - start}

  peers.serve(answer)


WORKERS: dict[str, Callable[[str], None]] = {
  "transformers": transformers_worker,
  "trl": trl_worker,
  "tunix": tunix_worker,
}


# --- this project ---------------------------------------------------------------------------------------------------


class Endless:
  """A model whose completions end at the limit alone, or at any of `stop_ids`."""

  def __init__(self, name: str, config, params, stop_ids: tuple[int, ...] = ()):
    self.name, self.config, self.params, self.tokenizer, self.stop_ids = name, config, params, self, stop_ids


def sample(
  model: Endless, prompts: list[list[int]], samples: int, new: int, greedy: bool, seed: int = 0
) -> tuple[float, list]:
  """Seconds and ids, [prompts * samples, new]."""
  from attrimem_jax.rollout.sampling import Sampling, complete

  keys = np.random.default_rng(seed).integers(0, 2**32, (len(prompts), samples, 2), np.uint32)
  start = time.perf_counter()
  groups = complete(
    model, [p[:-1] for p in prompts], [[p[-1:]] * samples for p in prompts], keys, Sampling(new, float(not greedy)),
    prompt_width=1,
  )  # fmt: skip
  seconds = time.perf_counter() - start
  return seconds, [completion.ids.tolist() for group in groups for completion in group]


def make_trainer(config, params) -> tuple:
  """(update, state) with the settings that the peers have."""
  import jax
  import jax.numpy as jnp

  from attrimem_jax.rl import optimizer as optimizers
  from attrimem_jax.rl.loss import LossSettings
  from attrimem_jax.rl.update import make_update

  optimizer = optimizers.make_optimizer(optimizers.OptimizerSettings(learning_rate=RATE))
  state = optimizers.init_state(optimizer, jax.tree.map(jnp.copy, params))
  return make_update(config, optimizer, LossSettings(kl_coefficient=0.0)), state


def batch_of(prompt: list[int], completions: list[list[int]]) -> "Batch":
  from attrimem_jax.nn.batching import pack
  from attrimem_jax.rl.update import Batch

  rows, new = len(completions), len(completions[0])
  shared = pack([prompt[:-1]], [[(prompt[-1:], c) for c in completions]], prompt_width=1, completion_width=new)
  spread = np.broadcast_to(advantages(rows)[None, :, None], (1, rows, new))
  return Batch(shared, np.ones((1, rows, new), bool), np.ascontiguousarray(spread))


def median(values: list[float]) -> float:
  return float(np.median(values[1:]))


def bench_generate(args: argparse.Namespace) -> None:
  import jax
  import jax.numpy as jnp

  from attrimem_jax.io import huggingface, models

  loaded, folder = models.load(args.model), args.folder / args.model
  if not (folder / "model.safetensors").exists():
    huggingface.write(folder, loaded.config, loaded.params, loaded.tokenizer)
  model = Endless(loaded.name, loaded.config, loaded.params)
  peer = peers.Peer(args.peer, __file__, "--worker", "transformers", "--folder", str(folder))
  rng = np.random.default_rng(0)
  big = jnp.ones(1 << 27)
  read = jax.jit(jnp.sum)
  rate = 4 * big.size / min(timed(lambda: read(big).block_until_ready()) for _ in range(8))
  weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
  for prompts, samples in ((8, 1), (1, 8)):
    ids = rng.integers(100, 40_000, (prompts, args.prompt)).tolist()
    ours, theirs, first = [], [], []
    for round_ in range(args.repeats + 1):
      ours.append(sample(model, ids, samples, args.new, False, round_)[0])
      first.append(sample(model, ids, samples, 1, False, round_)[0])
      theirs.append(peer.ask(prompts=ids, samples=samples, new=args.new, greedy=False)["seconds"])
    shape = model.config
    keys = 8 * shape.layers * shape.kv_heads * shape.head_size * (prompts * args.prompt + 8 * args.new / 2)
    least = (args.new - 1) * (weights + keys) / rate
    decoding = median(ours) - median(first)
    print(f"generate, {prompts} prompts of {args.prompt}, {samples} samples each, {args.new} new tokens: "
          f"{median(theirs) / median(ours):.2f} times as fast as transformers ({median(ours):.2f} s, "
          f"{median(theirs):.2f} s); decoding takes {decoding / least:.1f} times as long as reading weights and keys "
          f"at {rate / 1e9:.1f} GB/s would", flush=True)  # fmt: skip
  bench_queue(model, args)
  mine = np.array(sample(model, ids, 1, 16, True)[1])
  other = np.array(peer.ask(prompts=ids, samples=1, new=16, greedy=True)["ids"])
  print(f"greedy tokens equal to transformers': {(mine == other).mean():.0%} of {mine.size}")
  peer.close()


def bench_queue(model: Endless, args: argparse.Namespace, rows: int = 32, places: int = 8) -> None:
  """Completions of very different lengths: batches that wait for their longest, and places that are filled again."""
  from attrimem_jax.rollout.sampling import Sampling, complete

  rng, new = np.random.default_rng(0), 4 * args.new
  stops = tuple(rng.choice(model.config.vocab_size, model.config.vocab_size // 100, replace=False).tolist())
  model = Endless(model.name, model.config, model.params, stops)
  prompt = rng.integers(100, 40_000, args.prompt).tolist()
  keys = rng.integers(0, 2**32, (1, rows, 2), np.uint32)

  def some(part: slice, at_once: int) -> list:
    prompts = [[prompt[-1:]] * len(keys[0, part])]
    sampling = Sampling(new, 1.0)
    return complete(model, [prompt[:-1]], prompts, keys[:, part], sampling, prompt_width=1, at_once=at_once)[0]

  def in_batches() -> list:
    return [done for at in range(0, rows, places) for done in some(slice(at, at + places), places)]

  batches, queue = [], []
  for _ in range(args.repeats + 1):
    start = time.perf_counter()
    one = in_batches()
    batches.append(time.perf_counter() - start)
    start = time.perf_counter()
    other = some(slice(rows), places)
    queue.append(time.perf_counter() - start)
  lengths = [len(done.ids) for done in one]
  same = np.mean([np.array_equal(a.ids, b.ids) for a, b in zip(one, other, strict=True)])
  longest = sum(max(lengths[at : at + places]) for at in range(0, rows, places)) / (sum(lengths) / places)
  print(f"{rows} completions of {min(lengths)} to {max(lengths)} tokens (mean {np.mean(lengths):.0f}), {places} at a "
        f"time: with a queue {median(batches) / median(queue):.2f} times as fast as in batches, whose rows wait so "
        f"long that {longest:.2f} is the most; {same:.0%} of the completions are the same", flush=True)  # fmt: skip


def bench_update(args: argparse.Namespace) -> None:
  prompt, completions = tokens(args.prefix, args.rows, args.new)
  request = {"what": "update", "prompt": prompt, "completions": completions, "rows": args.rows, "new": args.new}
  found, params, others = networks(args)
  update, state = make_trainer(found, params)
  batch = batch_of(prompt, completions)
  taken: dict[str, list[float]] = {}
  for round_ in range(args.repeats + 1):
    start = time.perf_counter()
    state, metrics = update(state, None, batch)
    norm = float(metrics["grad_norm"])
    taken.setdefault("ours", []).append(time.perf_counter() - start)
    for name, peer in others.items():
      answer = peer.ask(**request)
      taken.setdefault(name, []).append(answer["seconds"])
      if name == "trl" and round_ == 0:
        print(f"norm of the first gradient {norm:.6f}, TRL's {answer['grad_norm']:.6f}", flush=True)
        if abs(norm / answer["grad_norm"] - 1) > 1e-3:
          raise SystemExit("the gradients differ: this is no comparison")
  count = args.rows * (args.prefix + args.new)
  print(f"update, prefix {args.prefix}, {args.rows} completions of {args.new}: {count / median(taken['ours']):,.0f} "
        "tokens/s, the prefix counted for every completion")  # fmt: skip
  for name in others:
    print(f"  {median(taken[name]) / median(taken['ours']):.1f} times as fast as {name} ({median(taken[name]):.2f} s)")
  close(others)


def bench_step(args: argparse.Namespace) -> None:
  import jax

  rows = 8
  prompt, completions = tokens(128, rows, args.new)
  found, params, others = networks(args)
  update, state = make_trainer(found, params)
  ours: list[float] = []
  theirs: dict[str, list[float]] = {name: [] for name in others}
  for round_ in range(args.repeats + 1):
    for number in range(4):
      start = time.perf_counter()
      model = Endless("policy", found, state.params)
      _, written = sample(model, [prompt], rows, args.new, False, 10 * round_ + number)
      state, metrics = update(state, None, batch_of(prompt, written))
      jax.block_until_ready(metrics)
      if number:
        ours.append(time.perf_counter() - start)
    for name, peer in others.items():
      answer = peer.ask(what="step", prompt=prompt, completions=completions, rows=rows, new=args.new)
      theirs[name].append(answer["seconds"])
  for name, values in theirs.items():
    print(f"step, prompt 128, {rows} samples of {args.new}: {median(values) / median(ours):.1f} times as fast as "
          f"{name} ({median(ours):.2f} s, {median(values):.2f} s)")  # fmt: skip
  close(others)


def tokens(prefix: int, rows: int, new: int) -> tuple[list[int], list[list[int]]]:
  rng = np.random.default_rng(0)
  return rng.integers(3, VOCAB, prefix).tolist(), rng.integers(3, VOCAB, (rows, new)).tolist()


def networks(args: argparse.Namespace) -> tuple:
  """(config, params, peers by name); TRL's network is read back, so that both start from the same weights."""
  from attrimem_jax.io import huggingface

  folder = args.folder / "tiny-qwen3"
  others = {"trl": peers.Peer(args.peer, __file__, "--worker", "trl", "--folder", str(folder))}
  if args.tunix:
    others["tunix"] = peers.Peer(args.tunix, __file__, "--worker", "tunix", "--folder", str(folder))
  return *huggingface.read(folder), others


def close(others: dict[str, peers.Peer]) -> None:
  for peer in others.values():
    peer.close()


def timed(action: Callable[[], object]) -> float:
  start = time.perf_counter()
  action()
  return time.perf_counter() - start


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", nargs="?", choices=("generate", "update", "step"))
  parser.add_argument("--peer", help="Python of an environment with transformers and trl")
  parser.add_argument("--tunix", help="Python of an environment with google-tunix; left out without it")
  parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/peers"), help="where models are put")
  parser.add_argument("--model", default="smollm2-135m-instruct")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt to generate from")
  parser.add_argument("--prefix", type=int, default=1024, help="tokens of the prefix of an update")
  parser.add_argument("--rows", type=int, default=32, help="completions of an update")
  parser.add_argument("--new", type=int, default=64, help="tokens of a completion")
  parser.add_argument("--worker", choices=tuple(WORKERS), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    WORKERS[args.worker](str(args.folder))
    return
  if not (args.what and args.peer):
    parser.error("say what to time, and give --peer")
  {"generate": bench_generate, "update": bench_update, "step": bench_step}[args.what](args)


if __name__ == "__main__":
  main()
