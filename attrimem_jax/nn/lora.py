"""LoRA (arXiv 2106.09685): the weights stay as they are, and low-rank factors beside some of them are trained.

The factors are a tree of their own, a subtree of the parameters. Joined with the frozen weights it is read like any
other model's parameters, and the frozen weights alone are the starting policy, so no second copy of them is held. The
product is never formed while training: x (W + s A B) is computed as x W + (x A) (s B), so no gradient of a whole matrix
is computed, and sampling reads hardly more than the frozen weights.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params

# Every matrix of a layer, and how many of its axes are inputs.
TARGETS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


@dataclasses.dataclass(frozen=True)
class Lora:
  """What is trained.

  Attributes:
    rank: r, columns of A and rows of B.
    alpha: A B is multiplied by alpha / r.
    targets: the matrices that are given factors, names of `TARGETS`.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    return self.alpha / self.rank

  def init(self, config: DecoderConfig, seed: int) -> Params:
    """Float32 factors on the host: A normal with variance 1 / inputs, B zero, so that they change nothing yet."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x10AA]))

    def leaf(path, shape: jax.ShapeDtypeStruct) -> np.ndarray:
      if path[-1].key.endswith("_b"):
        return np.zeros(shape.shape, np.float32)
      fan_in = np.prod(shape.shape[1:-1])
      return (rng.standard_normal(shape.shape, np.float32) / np.sqrt(fan_in)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, self.abstract(config))

  def abstract(self, config: DecoderConfig) -> Params:
    """The shapes of the factors, by target t: t_lora_a [L, inputs…, r] and t_lora_b [L, r, outputs…]."""
    weights, factors = decoder.abstract(config)["layers"], {}
    for name in self.targets:
      layers, *axes = weights[name].shape
      inputs, outputs = axes[: TARGETS[name]], axes[TARGETS[name] :]
      factors[f"{name}_lora_a"] = jax.ShapeDtypeStruct((layers, *inputs, self.rank), jnp.float32)
      factors[f"{name}_lora_b"] = jax.ShapeDtypeStruct((layers, self.rank, *outputs), jnp.float32)
    return {"layers": factors}

  def join(self, frozen: Params, factors: Params) -> Params:
    """Parameters for the decoder: the frozen weights' own buffers beside the factors, B scaled."""
    scaled = {name: leaf * self.scale if name.endswith("_b") else leaf for name, leaf in factors["layers"].items()}
    return frozen | {"layers": frozen["layers"] | scaled}

  def merge(self, frozen: Params, factors: Params) -> Params:
    """Parameters without factors, W + s A B, on the host in float32: what is exported."""
    layers = jax.device_get(frozen["layers"])
    added = {name: self._product(name, factors["layers"]) for name in self.targets}
    return jax.device_get(frozen) | {"layers": layers | {name: layers[name] + a for name, a in added.items()}}

  def _product(self, name: str, factors: Params) -> np.ndarray:
    a, b = (np.asarray(jax.device_get(factors[f"{name}_lora_{side}"])) for side in "ab")
    layers, rank = len(a), self.rank
    flat = np.matmul(a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)) * np.float32(self.scale)
    return flat.reshape(*a.shape[:-1], *b.shape[2:])


def whole(lora: Lora | None, frozen: Params | None, trained: Params) -> Params:
  """Parameters for the decoder from what a run trains: factors beside `frozen`, or all weights where `lora` is None."""
  if lora is None:
    return trained
  assert frozen is not None, "low-rank factors stand beside frozen weights"
  return lora.join(frozen, trained)
