"""A decoder in plain NumPy float64: one sequence at a time, neither padding nor cache. And weights to test with."""

import jax
import numpy as np

from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig

_SIZES = {"vocab_size": 53, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 6, "hidden": 24}
QWEN3 = DecoderConfig(**_SIZES, rope_theta=1e4)
QWEN2 = DecoderConfig(**_SIZES, rope_theta=1e6, qk_norm=False, qkv_bias=True, family="qwen2")
LLAMA = DecoderConfig(**_SIZES, rope_theta=1e5, norm_eps=1e-5, qk_norm=False, tied=False, family="llama")


def draw(config: DecoderConfig, seed: int = 0) -> decoder.Params:
  """Float32 weights drawn with NumPy; compiling `decoder.init` would take longer than a whole test."""
  rng = np.random.default_rng(seed)

  def leaf(path, shape):
    name = path[-1].key
    values = rng.normal(size=shape.shape)
    if "norm" in name:
      return (1 + 0.2 * values).astype(np.float32)
    return (values * (1.0 if name in ("embed", "head") else 0.4)).astype(np.float32) * np.float32(0.7)

  return jax.tree_util.tree_map_with_path(leaf, decoder.abstract(config))


def logits(config: DecoderConfig, params: decoder.Params, ids, visible: np.ndarray | None = None) -> np.ndarray:
  """float64 logits [T, V] of a sequence; `visible` [T, T] hides keys (columns) from queries (rows), or weighs them."""
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  ids = np.asarray(ids)
  seen = np.tril(np.ones((len(ids), len(ids)))) * (1.0 if visible is None else visible)
  x = p["embed"][ids]
  for number in range(config.layers):
    x = _layer(config, {name: a[number] for name, a in p["layers"].items()}, x, seen)
  return _norm(x, p["norm"], config.norm_eps) @ (p["embed"].T if config.tied else p["head"])


def log_softmax(z: np.ndarray) -> np.ndarray:
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def logprobs(config, params, before, completion, temperature: float = 1.0, visible=None) -> np.ndarray:
  """float64 log-probabilities of the tokens of `completion` after the tokens `before`."""
  ids = np.concatenate([before, completion]).astype(int)
  table = log_softmax(logits(config, params, ids, visible) / temperature)
  return table[np.arange(len(before), len(ids)) - 1, ids[len(before) :]]


def _norm(x, scale, eps):
  return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * scale


def _layer(config, w, x, seen):
  h = _norm(x, w["attention_norm"], config.norm_eps)
  q, k, v = (np.einsum("td,dnh->nth", h, w[name]) for name in "qkv")
  if config.qkv_bias:
    q, k, v = (a + w[f"{name}_bias"][:, None] for a, name in ((q, "q"), (k, "k"), (v, "v")))
  if config.qk_norm:
    q, k = _norm(q, w["q_norm"], config.norm_eps), _norm(k, w["k_norm"], config.norm_eps)
  q, k = _turn(q, config), _turn(k, config)
  heads = []
  for n in range(config.heads):
    shared = n * config.kv_heads // config.heads
    scores = np.where(seen > 0, q[n] @ k[shared].T / np.sqrt(config.head_size), -np.inf)
    p = seen * np.exp(scores - scores.max(-1, keepdims=True))
    heads.append(p / p.sum(-1, keepdims=True) @ v[shared])
  x = x + np.einsum("nth,nhd->td", np.stack(heads), w["o"])
  h = _norm(x, w["mlp_norm"], config.norm_eps)
  gate = h @ w["gate"]
  return x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]


def _turn(x, config):
  """Each pair (i, i + H/2) of a head is a complex number that position t multiplies by exp(i t θ^(-2i/H))."""
  half = config.head_size // 2
  frequency = config.rope_theta ** (-np.arange(half) * 2.0 / config.head_size)
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(x.shape[1])[:, None] * frequency)
  return np.concatenate([z.real, z.imag], -1)
