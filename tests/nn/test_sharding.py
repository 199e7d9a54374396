"""One table places everything, and eight devices compute what one computes."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from attrimem_jax.nn.sharding import Frozen, make_mesh, place_batch, spec


def mesh_of(data: int, fsdp: int, tensor: int) -> AbstractMesh:
  return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
  ("name", "shape", "expected"),
  [
    ("q", (2, 16, 4, 6), P(None, "fsdp", "tensor", None)),
    ("k", (2, 16, 1, 6), P(None, "fsdp", None, None)),  # one head is not divided by two
    ("embed", (53, 16), P(None, "fsdp")),
    ("down", (2, 24, 16), P(None, "tensor", "fsdp")),
    ("attention_norm", (2, 16), P()),
    ("q_lora_a", (2, 16, 8), P(None, "fsdp", None)),
    ("q_lora_b", (2, 8, 4, 6), P(None, None, "tensor", None)),
    ("o_lora_a", (2, 4, 6, 8), P(None, "tensor", None, None)),
    ("down_lora_b", (2, 8, 16), P(None, None, "fsdp")),
  ],
)
def test_an_axis_that_does_not_divide_is_left_out(name, shape, expected):
  assert spec(name, shape, mesh_of(2, 2, 2)) == expected


def test_a_mesh_of_more_devices_than_there_are_is_refused():
  count = len(jax.devices())
  with pytest.raises(
    ValueError, match=rf"config\.mesh asks for 2 x {count} x 1 = {2 * count} devices, {count} are here"
  ):
    make_mesh(data=2, fsdp=count)


def test_frozen_parameters_are_on_the_device_only_while_someone_uses_them():
  params = {"layers": {"q": np.arange(24, dtype=np.float32).reshape(1, 4, 2, 3)}, "norm": np.ones(4, np.float32)}
  frozen = Frozen(params, make_mesh(), offload=True)

  def kinds():
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(frozen._placed)}

  assert kinds() == {"pinned_host"}
  with frozen.on_devices() as outer:
    with frozen.on_devices() as inner:
      assert inner is outer, "one copy for all"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(outer)} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, outer, params)
    np.testing.assert_array_equal(jax.jit(lambda p: p["norm"] * 2)(outer), 2 * params["norm"])
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(outer))
  assert kinds() == {"pinned_host"}
  with Frozen(params, make_mesh()).on_devices() as kept:
    pass
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


def test_a_batch_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match=r"3 prefixes does not split over 2 devices \(config.mesh.data x fsdp\)"):
    place_batch({"ids": np.zeros((1, 3, 4))}, mesh_of(2, 1, 1))


@pytest.mark.slow
def test_eight_devices_compute_what_one_computes(repository: pathlib.Path):
  """In a process of its own, since the number of devices is fixed when JAX starts."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
  done = subprocess.run(
    [sys.executable, "-m", "tests.nn.eight_devices"],
    cwd=repository,
    env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  assert done.stdout.split() == ["8x1x1", "1x8x1", "2x2x2", "lora", "8x1x1", "1x8x1", "2x2x2"]
