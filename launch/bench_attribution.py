"""Times attribution against context-cite 0.0.4 and scikit-learn, alternating in one run: see bench_attribution.sh.

One case for both: a memory of twelve lines, one question, one fixed answer, 32 masks. context-cite runs in a process of
its own environment (this file with `--worker`), where torch is; it is asked over a pipe, so that the two take turns.
It removes text and encodes again, so that the tokens around a removed one may merge anew. Every line of the memory ends
with its line break and the question follows at once, so that removed lines leave the same ids. Hence weights are
compared by line, speed by line and by token.
"""

import argparse
import contextlib
import io
import pathlib
import time

import numpy as np
import peers

MEMORY = """\
- [2024-02-03] Irene moved from Leeds to a small flat in Porto.
- [2024-02-11] Irene's brother Tomas repairs old radios in his garage.
- [2024-02-19] Irene swims forty lengths every Tuesday morning.
- [2024-03-04] Tomas sold his motorbike and bought a second-hand van.
- [2024-03-12] Irene is writing a cookbook about soups from the coast.
- [2024-03-27] Irene gets a rash whenever she eats strawberries.
- [2024-04-08] Tomas and Irene plan to paint the kitchen yellow in June.
- [2024-04-15] The landlord raised the rent by forty euros a month.
- [2024-05-02] Irene lent her blue suitcase to a colleague named Odile.
- [2024-05-20] Tomas coaches a girls' football team on Saturdays.
- [2024-06-01] Irene's laptop broke and the repair took nine days.
- [2024-06-14] Odile returned the suitcase with a box of chocolates.
"""
QUESTION = "Which fruit must Irene avoid? Answer briefly."
ANSWER = "Irene must avoid strawberries."
TEMPLATE = "Memory:\n{context}Question: {query}"
MASKS, ALPHA, KEEP = 32, 0.01, 0.5


def parts_of(unit: str, tokenizer) -> list[tuple[int, int]]:
  """Character ranges of the sources of `MEMORY`."""
  if unit == "token":
    return tokenizer(MEMORY, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
  stops = np.cumsum([len(line) for line in MEMORY.splitlines(keepends=True)]).tolist()
  return list(zip([0, *stops[:-1]], stops, strict=True))


def peer_masks(masks: int, sources: int) -> np.ndarray:
  """The masks that context-cite draws: one generator for each, seeded with its number."""
  draw = [np.random.RandomState(seed).choice([False, True], size=sources, p=[1 - KEEP, KEEP]) for seed in range(masks)]
  return np.stack(draw)


# --- context-cite, in its own environment ---------------------------------------------------------------------------


def worker(folder: str) -> None:
  """Answers requests (unit, batch) with seconds, weights and ids."""
  import warnings

  warnings.filterwarnings("ignore")
  import nltk

  nltk.download = lambda *args, **kwargs: False  # it asks for data at import that these sources do not need
  import torch
  from context_cite import ContextCiter
  from context_cite.context_partitioner import BaseContextPartitioner
  from transformers import AutoModelForCausalLM, AutoTokenizer

  class Given(BaseContextPartitioner):
    """Sources that tile the text; one that is masked is deleted from it."""

    def __init__(self, unit: str):
      super().__init__(MEMORY)
      self.parts = [MEMORY[start:stop] for start, stop in parts_of(unit, tokenizer)]

    def split_context(self) -> None:
      pass

    @property
    def num_sources(self) -> int:
      return len(self.parts)

    def get_source(self, index: int) -> str:
      return self.parts[index]

    def get_context(self, mask=None) -> str:
      kept = range(len(self.parts)) if mask is None else np.flatnonzero(mask)
      return "".join(self.parts[i] for i in kept)

  tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
  model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

  def attribute(unit: str, batch: int) -> dict:
    with contextlib.redirect_stderr(io.StringIO()):
      start = time.perf_counter()
      citer = ContextCiter(
        model, tokenizer, MEMORY, QUESTION, num_ablations=MASKS, ablation_keep_prob=KEEP, batch_size=batch,
        prompt_template=TEMPLATE, partitioner=Given(unit),
      )  # fmt: skip
      ids, prompt = citer._get_prompt_ids(return_prompt=True)
      citer._cache["output"] = prompt + ANSWER  # explain this answer and not one that it generates
      weights = citer.get_attributions(verbose=False)
      seconds = time.perf_counter() - start
    return {"seconds": seconds, "weights": weights.tolist(), "ids": list(map(int, ids))}

  peers.serve(attribute)


# --- this project ---------------------------------------------------------------------------------------------------


class Ours:
  """The case as a `Problem`: the ids of the peer's own prompt, with the part that each belongs to."""

  def __init__(self, model, folder: pathlib.Path, unit: str):
    from transformers import AutoTokenizer

    from attrimem_jax.attribution import attribute
    from attrimem_jax.memory.context import Source
    from attrimem_jax.types import CallKey, Module

    self._lib, self._model, self._unit = attribute, model, unit
    tokenizer = AutoTokenizer.from_pretrained(folder)
    user = {"role": "user", "content": TEMPLATE.format(context=MEMORY, query=QUESTION)}
    text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first = text.index(MEMORY)
    parts = parts_of(unit, tokenizer)
    stops = [stop for _, stop in parts]
    inside = [start - first if first <= start < first + len(MEMORY) else -1 for start, _ in encoded["offset_mapping"]]
    source = np.array([int(np.searchsorted(stops, at, side="right")) if at >= 0 else -1 for at in inside], np.int32)
    begin = int(np.flatnonzero(source >= 0)[0])
    self.ids = encoded["input_ids"]
    self.prefix = self.ids[:begin]
    owner = CallKey("case", 0, 0, Module.SEMANTIC)
    answer = np.array(tokenizer(ANSWER, add_special_tokens=False)["input_ids"], np.int32)
    sources = tuple(Source(owner, i) for i in range(len(parts)))
    self.problem = attribute.Problem(np.array(self.ids[begin:], np.int32), source[begin:], sources, answer, ())

  def attribute(self, scorer: str, masks: int = MASKS) -> tuple[float, np.ndarray]:
    """Seconds, and weights with ContextCite's masks, target and penalty."""
    start = time.perf_counter()
    drawn = [peer_masks(masks, len(self.problem.sources))]
    scores = self._lib.score(self._model, self.prefix, [self.problem], drawn, scorer=scorer)
    measured = self._lib.Measurement(self.problem, *drawn, *scores)
    (found,) = self._lib.fit([measured], alpha=ALPHA, penalty="context_cite")
    return time.perf_counter() - start, found.weights

  def by_gradients(self, scorer: str, gradients: int) -> float:
    """Seconds for weights by gradients, without masks to scale them."""
    start = time.perf_counter()
    self._lib.fit(self._lib.measure(self._model, self.prefix, [self.problem], 0, gradients=gradients, scorer=scorer))
    return time.perf_counter() - start

  def seconds_at_the_limit(self, scorer: str, masks: int, rate: float) -> float:
    """What the products of the network alone take at `rate` FLOP/s."""
    tokens = self._lib.tokens_read(self.prefix, self.problem, peer_masks(masks, len(self.problem.sources)), scorer)
    shape = self._model.config
    layer = shape.width * shape.head_size * 2 * (shape.heads + shape.kv_heads) + 3 * shape.width * shape.hidden
    head = masks * len(self.problem.answer) * shape.width * shape.vocab_size
    return 2 * (tokens * shape.layers * layer + head) / rate


def matmul_rate(model) -> float:
  """FLOP/s of a float32 product of the size of the network's own."""
  import jax
  import jax.numpy as jnp

  a, b = jnp.ones((2048, model.config.width)), jnp.ones((model.config.width, model.config.hidden))
  product = jax.jit(jnp.matmul)
  product(a, b).block_until_ready()
  times = []
  for _ in range(20):
    start = time.perf_counter()
    product(a, b).block_until_ready()
    times.append(time.perf_counter() - start)
  return 2 * a.shape[0] * a.shape[1] * b.shape[1] / min(times)


def bench_context_cite(python: str, folder: pathlib.Path, model, repeats: int) -> None:
  peer, rate = peers.Peer(python, __file__, "--worker", str(folder)), matmul_rate(model)
  for unit in ("line", "token"):
    ours = Ours(model, folder, unit)
    for scorer in ("exact", "cached"):
      for masks in (MASKS, 9 * MASKS if scorer == "cached" else 2 * MASKS):
        ours.attribute(scorer, masks)  # compiles
    gradients = [(scorer, count) for scorer in ("masked", "cached") for count in (1, 5)]
    for wanted in gradients:
      ours.by_gradients(*wanted)
    taken: dict[str, list[float]] = {}
    for _ in range(repeats):
      for batch in (1, 8):
        answer = peer.ask(unit=unit, batch=batch)
        taken.setdefault(f"context-cite, batch {batch}", []).append(answer["seconds"])
      for scorer, more in (("exact", 2 * MASKS), ("cached", 9 * MASKS)):
        seconds, weights = ours.attribute(scorer)
        longer, _ = ours.attribute(scorer, more)
        taken.setdefault(scorer, []).append(seconds)
        taken.setdefault(f"{scorer} mask", []).append((longer - seconds) / (more - MASKS))
        if scorer == "exact":
          exact = weights
      for scorer, count in gradients:
        taken.setdefault(f"{count} {scorer} gradients", []).append(ours.by_gradients(scorer, count))
    best = min(np.median(taken[f"context-cite, batch {batch}"]) for batch in (1, 8))
    median = {name: float(np.median(values)) for name, values in taken.items()}
    print(
      f"\nsources: {len(ours.problem.sources)} by {unit}, prompt {len(ours.ids)} ids, {MASKS} masks, {repeats} rounds"
    )
    print("  " + ", ".join(f"{name} {value:.3f} s" for name, value in median.items()))
    for scorer in ("exact", "cached"):
      limit = ours.seconds_at_the_limit(scorer, MASKS, rate)
      print(f"  {scorer}: {best / median[scorer]:.1f} times as fast as context-cite at its better batch size; "
            f"{median[scorer] / limit:.1f} times the products alone at {rate / 1e9:.0f} GFLOP/s")  # fmt: skip
    for scorer, count in gradients:
      print(f"  gradients, {count} {scorer}: {best / median[f'{count} {scorer} gradients']:.1f} times as fast")
    print(f"  one more cached mask costs 1/{median['exact mask'] / median['cached mask']:.0f} of one more exact mask")
    theirs = np.array(answer["weights"])
    same = answer["ids"] == ours.ids
    error = np.abs(exact - theirs).max() / np.abs(theirs).max()
    print(f"  prompt ids equal: {same}; weights against context-cite's: {error:.1e} of the largest")
    if unit == "line" and not (same and error < 1e-3):
      raise SystemExit("weights differ from context-cite's")
  peer.close()


def bench_lasso(repeats: int) -> None:
  """64 problems of 32 masks and 1,024 sources, against a loop of scikit-learn at an objective that is not worse."""
  from sklearn.linear_model import Lasso

  from attrimem_jax.attribution import lasso

  rng = np.random.default_rng(0)
  print("\nLASSO: 64 problems, 32 masks, 1,024 sources")
  for alpha in (0.01, 0.1, 0.5):
    x = rng.random((64, MASKS, 1024)) < 0.5
    effect = np.where(np.arange(1024) < 4, 2.0, 0.0)
    y = x @ effect + rng.normal(size=(64, MASKS)) * 0.5
    problems = [lasso.Problem(a, b, 1) for a, b in zip(x, y, strict=True)]

    def objective(a, b, w, intercept, alpha=alpha):
      return ((b - intercept - a @ w) ** 2).sum() / (2 * MASKS) + alpha * np.abs(w).sum()

    lasso.fit(problems, penalty=lasso.Penalty.RAW, alpha=alpha)
    ratios = []
    for _ in range(repeats):
      start = time.perf_counter()
      ours = lasso.fit(problems, penalty=lasso.Penalty.RAW, alpha=alpha)
      middle = time.perf_counter()
      theirs = [
        Lasso(alpha=alpha, tol=1e-6, max_iter=200_000).fit(a.astype(float), b) for a, b in zip(x, y, strict=True)
      ]
      ratios.append((time.perf_counter() - middle) / (middle - start))
    mine = np.array([objective(a, b, f.weights.astype(float), f.intercept) for a, b, f in zip(x, y, ours, strict=True)])
    other = np.array([objective(a, b, f.coef_, f.intercept_) for a, b, f in zip(x, y, theirs, strict=True)])
    print(f"  alpha {alpha}: {np.median(ratios):.1f} times as fast; objective over scikit-learn's at most "
          f"{(mine / other - 1).max():+.1e}")  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/peers"), help="where the model is put")
  parser.add_argument("--peer", help="Python of an environment with context-cite; without it only LASSO is timed")
  parser.add_argument("--model", default="smollm2-135m-instruct")
  parser.add_argument("--repeats", type=int, default=3)
  parser.add_argument("--worker", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    worker(args.worker)
    return
  bench_lasso(args.repeats)
  if args.peer:
    from attrimem_jax.io import huggingface, models

    model, folder = models.load(args.model), args.folder / args.model
    if not (folder / "model.safetensors").exists():
      huggingface.write(folder, model.config, model.params, model.tokenizer)
    bench_context_cite(args.peer, folder, model, args.repeats)


if __name__ == "__main__":
  main()
