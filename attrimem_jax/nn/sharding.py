"""One table of names to mesh axes, and the placing of parameters and batches by it.

Axes: `data` splits batches only, `fsdp` splits batches and parameters, `tensor` splits heads and feed-forward columns.
An axis that does not divide a dimension is left out for that array, so small models run on any mesh.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Parameter name to the mesh axis of each dimension; layers (axis 0 of stacked arrays) are never split.
RULES: dict[str, tuple[str | None, ...]] = {
  "embed": ("tensor", "fsdp"),
  "head": ("fsdp", "tensor"),
  "q": (None, "fsdp", "tensor", None),
  "k": (None, "fsdp", "tensor", None),
  "v": (None, "fsdp", "tensor", None),
  "o": (None, "tensor", None, "fsdp"),
  "gate": (None, "fsdp", "tensor"),
  "up": (None, "fsdp", "tensor"),
  "down": (None, "tensor", "fsdp"),
  # Low-rank factors: A is split as its matrix's inputs are, B as the outputs, the rank never.
  **dict.fromkeys(("q_lora_a", "k_lora_a", "v_lora_a", "gate_lora_a", "up_lora_a"), (None, "fsdp", None)),
  "o_lora_a": (None, "tensor", None, None),
  "down_lora_a": (None, "tensor", None),
  **dict.fromkeys(("q_lora_b", "k_lora_b", "v_lora_b"), (None, None, "tensor", None)),
  **dict.fromkeys(("gate_lora_b", "up_lora_b"), (None, None, "tensor")),
  **dict.fromkeys(("o_lora_b", "down_lora_b"), (None, None, "fsdp")),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """A mesh over the first data * fsdp * tensor devices.

  Raises:
    ValueError: there are fewer devices than that.
  """
  size, devices = data * fsdp * tensor, jax.devices()
  if size > len(devices):
    raise ValueError(
      f"config.mesh asks for {data} x {fsdp} x {tensor} = {size} devices, {len(devices)} are here: lower its axes"
    )
  grid = np.array(devices[:size]).reshape(data, fsdp, tensor)
  return Mesh(grid, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
  """How the parameter `name` of a shape is split: by the table, without axes that do not divide."""
  axes = RULES.get(name, ())
  return P(*(axis if axis and shape[i] % mesh.shape[axis] == 0 else None for i, axis in enumerate(axes)))


def shardings(params: Any, mesh: Mesh) -> Any:
  """The sharding of each leaf of a tree of parameters (arrays or abstract ones), or of moments of the same tree."""

  def leaf(path, value):
    name = next((str(k.key) for k in reversed(path) if isinstance(k, jax.tree_util.DictKey)), "")
    return NamedSharding(mesh, spec(name, value.shape, mesh) if value.ndim else P())

  return jax.tree_util.tree_map_with_path(leaf, params)


def place(params: Any, mesh: Mesh) -> Any:
  """Puts a tree of parameters on the mesh; on one of many processes, which all hold the same tree, its share of it."""
  return jax.tree.map(_put, params, shardings(params, mesh))


def _put(leaf: Any, where: NamedSharding) -> jax.Array:
  if where.is_fully_addressable or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable):
    return jax.device_put(leaf, where)
  # Unlike device_put, this compares nothing with the other processes: that would send every weight over the network.
  whole = np.asarray(leaf)
  return jax.make_array_from_callback(whole.shape, where, lambda share: whole[share])


class Frozen:
  """Parameters that never change, placed on a mesh; with `offload` they wait in host memory while nobody uses them."""

  def __init__(self, params: Any, mesh: Mesh, offload: bool = False):
    self._placed = place(params, mesh)
    if offload:
      self._placed = jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("pinned_host")), self._placed)
    self._offload, self._users, self._here = offload, 0, None

  @contextlib.contextmanager
  def on_devices(self) -> Iterator[Any]:
    """The parameters in device memory, which is given back when the last of nested users is done."""
    if not self._offload:
      yield self._placed
      return
    if not self._users:
      self._here = jax.tree.map(lambda a: jax.device_put(a, a.sharding.with_memory_kind("device")), self._placed)
    self._users += 1
    try:
      yield self._here
    finally:
      self._users -= 1
      if not self._users:
        jax.tree.map(lambda a: a.delete(), self._here)
        self._here = None


def place_batch(batch: Any, mesh: Mesh) -> Any:
  """Puts micro-batches [A, P, ...] on the mesh, prefixes split over `data` and `fsdp`.

  Raises:
    ValueError: they do not divide.
  """
  ways = batch_ways(mesh)

  def one(leaf):
    if leaf.shape[1] % ways:
      raise ValueError(
        f"a micro-batch of {leaf.shape[1]} prefixes does not split over {ways} devices (config.mesh.data x fsdp): "
        f"make it a multiple of {ways}"
      )
    return _put(leaf, NamedSharding(mesh, P(None, ("data", "fsdp"))))

  return jax.tree.map(one, batch)


def batch_ways(mesh: Mesh) -> int:
  """Over how many devices the axes that split batches reach."""
  return math.prod(mesh.shape[axis] for axis in ("data", "fsdp"))


def spread(batch: Any, params: Any) -> Any:
  """Puts arrays [P, n, ...] of one forward pass on the devices of `params`, split over them.

  Prefixes are split over `data` and `fsdp` where they divide, otherwise rows where these do; an axis of 1 is never
  split. Nothing happens where the parameters lie on one device.
  """
  mesh = getattr(getattr(jax.tree.leaves(params)[0], "sharding", None), "mesh", None)
  if mesh is None or mesh.size == 1:
    return batch
  leaves = jax.tree.leaves(batch)
  ways, prefixes = batch_ways(mesh), leaves[0].shape[0]
  rows = max(leaf.shape[1] if leaf.ndim > 2 else 1 for leaf in leaves)

  def one(leaf):
    if prefixes % ways == 0:
      split = P(("data", "fsdp"))
    elif rows % ways == 0 and leaf.ndim > 2 and leaf.shape[1] == rows:
      split = P(None, ("data", "fsdp"))
    else:
      split = P()
    return _put(leaf, NamedSharding(mesh, split))

  return jax.tree.map(one, batch)


def fetch(tree: Any) -> Any:
  """The tree as NumPy arrays. Every process gets all of it, so all have to ask."""
  leaves, structure = jax.tree.flatten(tree)
  far = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and not _is_here(leaf)]
  if far:
    everywhere = NamedSharding(leaves[far[0]].sharding.mesh, P())
    for i, whole in zip(far, _gather(everywhere)([leaves[i] for i in far]), strict=True):
      leaves[i] = whole
  return jax.device_get(jax.tree.unflatten(structure, leaves))


def _is_here(leaf: jax.Array) -> bool:
  return leaf.is_fully_addressable or leaf.is_fully_replicated


@functools.cache
def _gather(where: NamedSharding) -> Any:
  return jax.jit(lambda leaves: leaves, out_shardings=where)
