"""The GRPO update: its gradient does not depend on the layout or the split, and its first step is checked."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attrimem_jax.nn import batching, decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.rl import accumulation
from attrimem_jax.rl.loss import LossSettings
from attrimem_jax.rl.optimizer import OptimizerSettings, init_state, make_optimizer
from attrimem_jax.rl.update import Batch, check_first_step, make_logprobs, make_update
from tests.rl import bigram

SETTINGS = LossSettings(temperature=0.7)
OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=1e-2))
UPDATE = make_update(None, OPTIMIZER, SETTINGS, bigram.logprobs)
RAW = optax.trace(0.0)  # an "optimiser" whose state is the gradient itself
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}  # compile time, not run time, counts


def make_batch(shared, seed=0, **others) -> Batch:
  mask = shared.suffix_mask[..., -bigram.COUNT :]
  advantages = np.random.default_rng(seed).normal(size=mask.shape)
  return Batch(shared, mask, jnp.asarray(advantages, jnp.float32), **others)


@pytest.fixture
def state():
  return init_state(OPTIMIZER, bigram.init(0))


@pytest.fixture(scope="module")
def batch():
  return make_batch(bigram.sequences())


def test_first_step_has_no_kl_ratio_one_and_moves(state, batch):
  state, metrics = UPDATE(state, bigram.init(0), batch)
  assert check_first_step(metrics)
  assert metrics["kl"] == metrics["kl_k1"] == metrics["kl_k2"] == metrics["clip_fraction"] == 0
  np.testing.assert_allclose([metrics["ratio_mean"], metrics["ratio_max"]], 1, rtol=1e-6)
  assert metrics["tokens"] == 24
  assert state.step == 1
  _, metrics = UPDATE(state, bigram.init(0), batch)
  assert metrics["kl"] > 0


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_change_nothing(batch, normalisation, count):
  """Off policy and away from the reference, so that every term has a gradient."""
  settings = LossSettings(normalisation=normalisation, constant_length=5, kl_coefficient=0.5)
  update = make_update(None, RAW, settings, bigram.logprobs)
  old = bigram.logprobs(bigram.init(1), batch.shared, bigram.COUNT)[0]
  batch = batch.replace(old_logp=old, sampler_logp=old - 0.01)
  whole, metrics = update(init_state(RAW, bigram.init(0)), bigram.init(2), batch)
  parts, split_metrics = update(init_state(RAW, bigram.init(0)), bigram.init(2), accumulation.split(batch, count))
  assert set(metrics) >= {"kl", "sampler_gap_max", "clamped_fraction", "advantage_abs", "grad_norm"}
  for name in metrics:
    np.testing.assert_allclose(split_metrics[name], metrics[name], rtol=2e-6, atol=1e-7, err_msg=name)
  for a, b in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state), strict=True):
    np.testing.assert_allclose(b, a, atol=1e-6)


def test_a_filler_prefix_changes_nothing(batch):
  """Rows without tokens pad a batch to a number that can be split."""
  update = make_update(None, RAW, SETTINGS, bigram.logprobs)
  padded = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), batch)
  padded = padded.replace(loss_mask=padded.loss_mask.at[-1].set(False))
  got, expected = (update(init_state(RAW, bigram.init(0)), bigram.init(1), b) for b in (padded, batch))
  np.testing.assert_allclose(got[1]["loss"], expected[1]["loss"], rtol=1e-6)
  for a, b in zip(jax.tree.leaves(got[0].opt_state), jax.tree.leaves(expected[0].opt_state), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("committed", [False, True])
def test_one_compilation_however_many_updates(batch, committed):
  update = make_update(None, OPTIMIZER, SETTINGS, bigram.logprobs)
  sharding = NamedSharding(jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,)), P())
  params, reference = (jax.device_put(bigram.init(0), sharding) if committed else bigram.init(0) for _ in range(2))
  state = init_state(OPTIMIZER, params)
  for _ in range(3):
    state, _ = update(state, reference, batch)
  assert update.compilations == 1


FOUR_DEVICES = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attrimem_jax.rl import accumulation
from attrimem_jax.rl.optimizer import init_state
from attrimem_jax.rl.update import make_update
from tests.rl import bigram
from tests.rl.test_update import OPTIMIZER, SETTINGS, make_batch

mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
batch = jax.tree.map(np.asarray, make_batch(bigram.sequences(8)))
pad = lambda params: {name: jnp.pad(w, (0, 1)) for name, w in params.items()}

def run(place, place_batch, updates):
  update = make_update(None, OPTIMIZER, SETTINGS, bigram.logprobs)
  state, reference = init_state(OPTIMIZER, place(pad(bigram.init(0)))), place(pad(bigram.init(0)))
  before = jax.tree.map(lambda leaf: leaf.sharding, state)
  for _ in range(updates):
    state, metrics = update(state, reference, place_batch(accumulation.split(batch, 2)))
  assert update.compilations == 1, update.compilations
  assert jax.tree.map(lambda leaf: leaf.sharding, state) == before
  return state, metrics

split = {"table": NamedSharding(mesh, P("fsdp")), "prefix_bias": NamedSharding(mesh, P())}
prefixes = NamedSharding(mesh, P(None, "fsdp"))
got = run(lambda params: jax.device_put(params, split), lambda batch: jax.device_put(batch, prefixes), 3)
expected = run(lambda params: params, lambda batch: batch, 3)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
"""


@pytest.mark.slow
def test_four_devices_compute_the_same_and_keep_the_shardings():
  subprocess.run([sys.executable, "-c", FOUR_DEVICES], check=True)


def test_shared_prefix_gradient_equals_the_plain_one():
  """A tiny Qwen3: every suffix behind one shared prefix, against each row with its whole text to itself."""
  config = DecoderConfig(vocab_size=bigram.VOCAB, width=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=24)
  shared = bigram.sequences(prefixes=2, rows=3)
  batch = make_batch(shared)
  plain = batch.replace(shared=_unshared(shared))
  plain = plain.replace(
    loss_mask=batch.loss_mask.reshape(6, 1, -1), advantages=batch.advantages.reshape(6, 1, bigram.COUNT)
  )
  start = jax.jit(lambda seed: decoder.init(config, jax.random.key(seed)), compiler_options=FAST)
  update = make_update(config, RAW, LossSettings(kl_coefficient=0.5, temperature=0.8))
  results = []
  for layout in (batch, plain):
    state, reference = init_state(RAW, start(0)), start(1)
    results.append(update.lower(state, reference, layout).compile(FAST)(state, reference, layout))
  (got, got_metrics), (expected, expected_metrics) = results
  for name in expected_metrics:
    np.testing.assert_allclose(got_metrics[name], expected_metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)
  leaves = jax.tree_util.tree_leaves_with_path(got.opt_state)
  for (path, a), b in zip(leaves, jax.tree.leaves(expected.opt_state), strict=True):
    assert np.abs(b).max() > 1e-4, f"{path} has no gradient to compare"
    np.testing.assert_allclose(a, b, atol=1e-5, err_msg=str(path))


def _unshared(shared: decoder.Shared) -> decoder.Shared:
  """[P, n] suffixes as P·n rows with their own copy of the prefix, all but its first token moved into the suffix."""
  prefixes, rows = [], []
  for p in range(shared.suffix.shape[0]):
    head = np.asarray(shared.prefix[p])[np.asarray(shared.prefix_mask[p])]
    for i in range(shared.suffix.shape[1]):
      cells, real = np.asarray(shared.suffix[p, i]), np.asarray(shared.suffix_mask[p, i])
      prompt, completion = cells[: -bigram.COUNT][real[: -bigram.COUNT]], cells[-bigram.COUNT :][real[-bigram.COUNT :]]
      prefixes.append(head[:1])
      rows.append([(np.concatenate([head[1:], prompt]), completion)])
  return jax.tree.map(jnp.asarray, batching.pack(prefixes, rows, completion_width=bigram.COUNT))


def test_temperature_reaches_policy_reference_and_old_log_probabilities(state, batch):
  """Log-probabilities at the sampling temperature give ratio 1; at another temperature they do not."""
  for temperature, expected in ((SETTINGS.temperature, True), (1.0, False)):
    old = make_logprobs(None, bigram.COUNT, temperature, bigram.logprobs)(state.params, batch.shared)
    _, metrics = UPDATE(init_state(OPTIMIZER, bigram.init(0)), bigram.init(0), batch.replace(old_logp=old))
    assert (abs(metrics["ratio_max"] - 1) < 1e-5) == expected


def test_learns_to_prefer_what_was_rewarded(state, batch):
  sign = jnp.where(jnp.arange(2)[None, :, None] == 0, 1.0, -1.0)
  batch = batch.replace(advantages=jnp.broadcast_to(sign, batch.advantages.shape))
  logprobs = make_logprobs(None, bigram.COUNT, 1.0, bigram.logprobs)
  before = logprobs(state.params, batch.shared).sum((0, 2))
  for _ in range(20):
    state, _ = UPDATE(state, bigram.init(0), batch)
  after = logprobs(state.params, batch.shared).sum((0, 2))
  assert after[0] > before[0] + 1
  assert after[1] < before[1] - 1


def test_without_a_reference(state, batch):
  update = make_update(None, OPTIMIZER, LossSettings(kl_coefficient=0.0), bigram.logprobs)
  _, metrics = update(state, None, batch)
  assert "kl" not in metrics
  assert check_first_step(metrics)


def test_settings_that_contradict_themselves():
  with pytest.raises(ValueError, match="clip_low: 2 must be in"):
    make_update(None, OPTIMIZER, LossSettings(clip_low=2))


GOOD = {
  "kl": 1e-9,
  "kl_k1": -1e-7,
  "kl_k2": 1e-9,
  "grad_norm": 1.0,
  "update_norm": 0.1,
  "tokens": 5,
  "advantage_abs": 1,
}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"kl_k1": -2e-4}, "not the starting policy"),
    ({"kl": float("nan")}, "not the starting policy"),
    ({"update_norm": 0.0}, "moved no weight"),
    ({"grad_norm": float("inf")}, "not finite"),
  ],
)
def test_a_first_step_that_proves_a_fault(change, message):
  with pytest.raises(RuntimeError, match=message):
    check_first_step(GOOD | change)


def test_a_first_step_that_proves_nothing():
  assert check_first_step(GOOD)
  assert not check_first_step(GOOD | {"advantage_abs": 0.0, "update_norm": 0.0})
  assert not check_first_step(GOOD | {"tokens": 0, "update_norm": 0.0})


def test_once_the_weights_moved_for_whatever_reason_the_check_is_over():
  """Weight decay moves them even if all groups are flat; the next step's KL is then allowed to be what it is."""
  assert check_first_step(GOOD | {"advantage_abs": 0.0})
