"""The supervised update: what carries a loss, and that no split of the batch changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.rl import accumulation
from attrimem_jax.rl.optimizer import OptimizerSettings, init_state, make_optimizer
from attrimem_jax.rl.sft import SftBatch, make_sft_evaluation, make_sft_update
from tests.rl import bigram

OPTIMIZER = make_optimizer(OptimizerSettings(learning_rate=3e-2, clip_norm=1.0))
UPDATE = make_sft_update(None, OPTIMIZER, bigram.logprobs)
EVALUATE = make_sft_evaluation(None, bigram.logprobs)


@pytest.fixture
def state():
  return init_state(OPTIMIZER, bigram.init(0))


@pytest.fixture(scope="module")
def batch():
  shared = bigram.sequences()
  return SftBatch(shared, shared.suffix_mask[..., -bigram.COUNT :])


def test_loss_is_the_mean_over_completion_tokens_with_the_stop_token(state, batch):
  logp = np.asarray(bigram.logprobs(state.params, batch.shared, bigram.COUNT)[0], np.float64)
  mask = np.asarray(batch.loss_mask)
  stops = np.asarray(batch.shared.suffix[..., -bigram.COUNT :])[mask] == bigram.STOP
  assert stops.sum() == 8, "every completion's stop token is a target"
  _, metrics = UPDATE(state, batch)
  assert metrics["tokens"] == mask.sum() == (1 + 2) + (2 + 3) + (3 + 4) + (4 + 5)
  np.testing.assert_allclose(metrics["loss"], -logp[mask].mean(), rtol=1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_change_nothing(batch, count):
  whole, metrics = UPDATE(init_state(OPTIMIZER, bigram.init(0)), batch)
  parts, split_metrics = UPDATE(init_state(OPTIMIZER, bigram.init(0)), accumulation.split(batch, count))
  for name in metrics:
    np.testing.assert_allclose(split_metrics[name], metrics[name], rtol=2e-6, err_msg=name)
  # Adam's first moments after one step are a tenth of the gradient: compared before the division magnifies rounding.
  for a, b in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state), strict=True):
    np.testing.assert_allclose(b, a, atol=1e-7)


def test_targets_on_padding_are_ignored(state, batch):
  careless = batch.replace(loss_mask=jnp.ones_like(batch.loss_mask))
  for value, expected in zip(EVALUATE(state.params, careless), EVALUATE(state.params, batch), strict=True):
    assert value == expected


def test_no_target_leaves_everything_as_it_was(state, batch):
  state, _ = UPDATE(state, batch)  # so that there is momentum to go wrong with
  before = jax.tree.map(np.array, (state.params, state.opt_state))
  state, metrics = UPDATE(state, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
  assert metrics["skipped"] == 1
  assert all(metrics[name] == 0 for name in ("tokens", "loss", "update_norm", "grad_norm"))
  assert state.step == 2
  jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)


def test_it_learns_and_the_state_is_donated(state, batch):
  given, before = state.params["table"], EVALUATE(state.params, batch)[0]
  for _ in range(60):
    state, metrics = UPDATE(state, batch)
  assert given.is_deleted()
  assert state.step == 60
  assert metrics["loss"] < 0.5 * before
  split = EVALUATE(state.params, accumulation.split(batch, 2))[0]
  np.testing.assert_allclose(split, EVALUATE(state.params, batch)[0], rtol=1e-6)
