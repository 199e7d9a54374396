"""The supervised update: what carries a loss, and that no split of the batch changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.nn import batching, decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.rl import accumulation
from attrimem_jax.rl.optimizer import OptimizerSettings, init_state, make_optimizer
from attrimem_jax.rl.sft import SftBatch, make_sft_evaluation, make_sft_update

CONFIG = DecoderConfig(vocab_size=23, width=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=24)
STOP = 1


@pytest.fixture(scope="module")
def params():
  return decoder.init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
  """Four prefixes of unequal length with two completions each; completions of 1 to 4 tokens end in the stop token."""
  rng = np.random.default_rng(0)

  def ids(length):
    return rng.integers(2, 23, length).tolist()

  prefixes = [ids(length) for length in (3, 7, 5, 1)]
  suffixes = [[(ids(2), [*ids(i % 3 + j), STOP]) for j in range(2)] for i in range(4)]
  shared = batching.pack(prefixes, suffixes, prompt_width=3, completion_width=5, prefix_width=8)
  return SftBatch(jax.tree.map(jnp.asarray, shared), jnp.asarray(shared.suffix_mask[..., -5:]))


def sgd(clip=0.0):
  return make_optimizer(OptimizerSettings(learning_rate=1e-2, clip_norm=clip))


def test_loss_is_the_mean_over_completion_tokens_with_the_stop_token(params, batch):
  _, metrics = make_sft_update(CONFIG, sgd())(init_state(sgd(), jax.tree.map(jnp.copy, params)), batch)
  logp = np.asarray(decoder.token_logprobs(CONFIG, params, batch.shared, 5)[0], np.float64)
  mask = np.asarray(batch.loss_mask)
  assert metrics["tokens"] == mask.sum() == 8 + 2 * (0 + 1 + 2 + 0) + 4
  np.testing.assert_allclose(metrics["loss"], -logp[mask].mean(), rtol=1e-6)
  stops = np.asarray(batch.shared.suffix[..., -5:])[mask] == STOP
  assert stops.sum() == 8, "every completion's stop token is a target"


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_change_nothing(params, batch, count):
  update = make_sft_update(CONFIG, sgd())
  whole, metrics = update(init_state(sgd(), jax.tree.map(jnp.copy, params)), batch)
  parts, split_metrics = update(init_state(sgd(), jax.tree.map(jnp.copy, params)), accumulation.split(batch, count))
  for name in metrics:
    np.testing.assert_allclose(split_metrics[name], metrics[name], rtol=2e-6, err_msg=name)
  # First moments are the gradients times 0.1: the gradient itself, before Adam's division magnifies rounding.
  first, second = (jax.tree.leaves(state.opt_state) for state in (whole, parts))
  for a, b in zip(first, second, strict=True):
    np.testing.assert_allclose(b, a, atol=1e-6)


def test_targets_outside_the_suffix_are_ignored(params, batch):
  careless = batch.replace(loss_mask=jnp.ones_like(batch.loss_mask))
  evaluate = make_sft_evaluation(CONFIG)
  for value, expected in zip(evaluate(params, careless), evaluate(params, batch), strict=True):
    assert value == expected


def test_no_target_leaves_everything_as_it_was(params, batch):
  start = init_state(sgd(), jax.tree.map(jnp.copy, params))
  moments = jax.tree.map(np.asarray, start.opt_state)
  state, metrics = make_sft_update(CONFIG, sgd())(start, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
  assert metrics["skipped"] == 1 and metrics["tokens"] == 0 and metrics["loss"] == 0 and metrics["update_norm"] == 0
  assert state.step == 1
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
  jax.tree.map(np.testing.assert_array_equal, state.opt_state, moments)


def test_it_learns_and_the_state_is_donated(params, batch):
  update, evaluate = make_sft_update(CONFIG, sgd(1.0)), make_sft_evaluation(CONFIG)
  state = init_state(sgd(1.0), jax.tree.map(jnp.copy, params))
  given = state.params["embed"]
  before = evaluate(params, batch)[0]
  for _ in range(30):
    state, metrics = update(state, batch)
  assert given.is_deleted()
  assert metrics["loss"] < 0.5 * before and state.step == 30
  np.testing.assert_allclose(evaluate(state.params, accumulation.split(batch, 2))[0], evaluate(state.params, batch)[0], rtol=1e-6)
