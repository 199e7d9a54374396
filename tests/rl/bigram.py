"""A policy that compiles in no time: the next token depends on the last one and on the sum of the prefix."""

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import batching
from attrimem_jax.nn.decoder import Shared

VOCAB, STOP, COUNT = 11, 1, 5


def init(seed: int) -> dict:
  """Float32 weights: `table` [V, V] of bigram logits and `prefix_bias` [V, V], added for every token of the prefix."""
  rng = np.random.default_rng(seed)
  return {name: jnp.asarray(rng.normal(size=(VOCAB, VOCAB)), jnp.float32) for name in ("table", "prefix_bias")}


def logprobs(params: dict, batch: Shared, count: int, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
  """As the decoder's: (logp, entropy) float32[P, n, count] of the last `count` columns, 0 on padding."""
  prefix = jnp.sum(params["prefix_bias"][batch.prefix] * batch.prefix_mask[..., None], axis=1) / 8
  logits = params["table"][batch.suffix[:, :, -count - 1 : -1]] + prefix[:, None, None]
  logp_v = jax.nn.log_softmax(logits / temperature)
  mask, targets = batch.suffix_mask[:, :, -count:], batch.suffix[:, :, -count:]
  logp = jnp.take_along_axis(logp_v, targets[..., None], axis=-1)[..., 0]
  return jnp.where(mask, logp, 0.0), jnp.where(mask, -jnp.sum(jnp.exp(logp_v) * logp_v, axis=-1), 0.0)


def sequences(prefixes: int = 4, rows: int = 2) -> Shared:
  """Prefixes of unequal length, each with `rows` completions of 1 to 5 tokens that end in the stop token."""
  rng = np.random.default_rng(0)

  def ids(length: int) -> list[int]:
    return rng.integers(2, VOCAB, length).tolist()

  heads = [ids(1 + 2 * p % 7) for p in range(prefixes)]
  tails = [[(ids(2), [*ids((p + j) % 5), STOP]) for j in range(rows)] for p in range(prefixes)]
  shared = batching.pack(heads, tails, prompt_width=3, completion_width=COUNT, prefix_width=8)
  return jax.tree.map(jnp.asarray, shared)
