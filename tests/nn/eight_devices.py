"""Run by `test_sharding` on eight devices: log-probabilities and one GRPO update on each mesh, against one device."""

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.nn import sharding
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Shared
from attrimem_jax.nn.lora import TARGETS, Lora
from attrimem_jax.rl.loss import LossSettings
from attrimem_jax.rl.optimizer import OptimizerSettings, init_state, make_optimizer
from attrimem_jax.rl.update import Batch, make_logprobs, make_update
from tests.nn import oracle

# Eight prefixes, and sizes that the axes of all three meshes divide, but for an odd vocabulary.
CONFIG = DecoderConfig(53, 16, 2, 4, 2, 6, 24, rope_theta=1e4)
COUNT = 4
# Steps of plain size instead of Adam's signs, which would turn rounding of a gradient near zero into a whole step.
OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=1e-2, eps=1e-2))
UPDATE = make_update(CONFIG, OPTIMIZER, LossSettings(kl_coefficient=0.1))
LORA = Lora(3, 6.0, tuple(TARGETS))
LORA_UPDATE = make_update(CONFIG, OPTIMIZER, LossSettings(kl_coefficient=0.1), lora=LORA)
LOGPROBS = make_logprobs(CONFIG, COUNT)


def batch() -> Batch:
  rng = np.random.default_rng(0)

  def tokens(low: int, high: int):
    return rng.integers(53, size=rng.integers(low, high))

  suffixes = [[(tokens(1, 5), tokens(1, COUNT + 1)) for _ in range(2)] for _ in range(8)]
  shared = pack([tokens(1, 7) for _ in range(8)], suffixes, step=8, completion_width=COUNT)
  mask = shared.suffix_mask[..., -COUNT:]
  whole = Batch(shared, mask, rng.normal(size=mask.shape).astype(np.float32))
  return jax.tree.map(lambda leaf: leaf[None], whole)


def run(params, reference, batch: Batch, mesh=None):
  """Log-probabilities, weights after one update, and its metrics. The state is donated, so it is made here."""
  state = init_state(OPTIMIZER, jax.tree.map(jnp.array, params))
  if mesh is not None:
    state = jax.device_put(state, sharding.shardings(state, mesh))
    reference, batch = sharding.place(reference, mesh), sharding.place_batch(batch, mesh)
    q = state.params["layers"]["q"]
    split = (mesh.shape["fsdp"] if 16 % mesh.shape["fsdp"] == 0 else 1) * mesh.shape["tensor"]
    assert q.addressable_shards[0].data.size * split == q.size, "parameters are divided"
    assert batch.loss_mask.addressable_shards[0].data.shape[1] == 8 // (mesh.shape["data"] * mesh.shape["fsdp"])
  logp = LOGPROBS(state.params, jax.tree.map(lambda leaf: leaf[0], batch.shared))
  state, metrics = UPDATE(state, reference, batch)
  return jax.device_get((logp, state.params, metrics))


def run_lora(factors, frozen, batch: Batch, mesh=None):
  """As `run`, of factors beside frozen weights."""
  state = init_state(OPTIMIZER, jax.tree.map(jnp.array, factors))
  if mesh is not None:
    state = jax.device_put(state, sharding.shardings(state, mesh))
    frozen, batch = sharding.place(frozen, mesh), sharding.place_batch(batch, mesh)
    a, b = (state.params["layers"][name].addressable_shards[0].data.shape for name in ("q_lora_a", "q_lora_b"))
    assert a == (2, 16 // mesh.shape["fsdp"], 3), a
    assert b == (2, 3, 4 // mesh.shape["tensor"], 6), b
  logp = LOGPROBS(LORA.join(frozen, state.params), jax.tree.map(lambda leaf: leaf[0], batch.shared))
  state, metrics = LORA_UPDATE(state, frozen, batch)
  return jax.device_get((logp, state.params, metrics))


def main() -> None:
  assert len(jax.devices()) == 8
  params, reference, whole = oracle.draw(CONFIG), oracle.draw(CONFIG, 1), batch()
  expected = run(params, reference, whole)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected[1], params)
  assert min(jax.tree.leaves(moved)) > 1e-4, "every weight learns"
  for axes in ((8, 1, 1), (1, 8, 1), (2, 2, 2)):
    found = run(params, reference, whole, sharding.make_mesh(*axes))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)
    print("x".join(map(str, axes)))
  print("lora")
  rng = np.random.default_rng(2)
  factors = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), LORA.abstract(CONFIG))
  expected = run_lora(factors, params, whole)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected[1], factors)
  assert min(jax.tree.leaves(moved)) > 1e-4, "every factor learns"
  for axes in ((8, 1, 1), (1, 8, 1), (2, 2, 2)):
    found = run_lora(factors, params, whole, sharding.make_mesh(*axes))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)
    print("x".join(map(str, axes)))
  check_spread(params, jax.tree.map(lambda leaf: leaf[0], whole.shared))


def check_spread(params, shared: Shared) -> None:
  """One forward pass is split by prefixes, or by rows where it has one prefix, and left alone on one device."""
  assert sharding.spread(shared, params) is shared
  far = sharding.place(params, sharding.make_mesh(2, 2, 2))
  spread = sharding.spread(shared, far)
  assert spread.suffix.addressable_shards[0].data.shape[0] == 2, "eight prefixes over data x fsdp = 4"
  single = Shared(*(getattr(shared, name)[:1] for name in ("prefix", "prefix_mask")), *rows_of(shared))
  spread = sharding.spread(single, far)
  assert spread.prefix.sharding.is_fully_replicated
  assert spread.suffix.addressable_shards[0].data.shape[1] == 4, "sixteen rows over 4"
  expected, found = (LOGPROBS(*given) for given in ((params, single), (far, spread)))
  np.testing.assert_allclose(sharding.fetch(found), expected, atol=1e-5, rtol=1e-5)


def rows_of(shared: Shared):
  """All suffixes of all prefixes as the rows of one."""
  return (leaf.reshape(1, -1, leaf.shape[-1]) for leaf in (shared.suffix, shared.suffix_mask))


if __name__ == "__main__":
  main()
