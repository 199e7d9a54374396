"""The policy loss by hand: clipping, KL estimators, normalisation, and what masked columns may hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.rl.loss import LossSettings, Tokens, k1, k2, k3, policy_loss, token_weights

PLAIN = LossSettings(kl_coefficient=0.0)


def tokens(logp, advantages, mask=None, normalisation="token", **others) -> Tokens:
  """Tokens of rows [..., C]; `others` hold further log-probabilities as lists."""
  logp = jnp.asarray(logp, jnp.float32)
  mask = jnp.ones(logp.shape, bool) if mask is None else jnp.asarray(mask, bool)
  return Tokens(
    logp=logp,
    entropy=jnp.ones_like(logp),
    mask=mask,
    weight=token_weights(mask, normalisation, 10),
    share=token_weights(mask, "token"),
    advantages=jnp.asarray(advantages, jnp.float32),
    **{name: jnp.asarray(values, jnp.float32) for name, values in others.items()},
  )


def test_on_policy_the_value_is_zero_and_the_gradient_is_not():
  """Four tokens with advantages that sum to zero: the surrogate's value says nothing, its slope is −Â/4."""

  def loss(logp):
    return policy_loss(dataclasses.replace(batch, logp=logp), PLAIN)[0]

  batch = tokens([[-1.0, -2.0], [-3.0, -0.5]], [[1.0, 1.0], [-1.0, -1.0]])
  assert loss(batch.logp) == 0
  np.testing.assert_allclose(jax.grad(loss)(batch.logp), [[-0.25, -0.25], [0.25, 0.25]])


@pytest.mark.parametrize(
  ("ratio", "advantage", "loss", "slope", "clipped"),
  [
    (1.5, 1.0, -1.28, 0.0, 1),  # better and already more likely: bounded by 1 + ε_high
    (1.5, -1.0, 1.5, 1.5, 0),  # worse and more likely: never bounded
    (0.5, 1.0, -0.5, -0.5, 0),
    (0.5, -1.0, 0.8, 0.0, 1),  # worse and already less likely: bounded by 1 − ε_low
    (1.1, 2.0, -2.2, -2.2, 0),
  ],
)
def test_clipping_by_hand(ratio, advantage, loss, slope, clipped):
  settings = dataclasses.replace(PLAIN, clip_low=0.2, clip_high=0.28)
  batch = tokens([np.log(ratio) - 1.0], [advantage], old_logp=[-1.0])
  (value, totals), gradient = jax.value_and_grad(
    lambda logp: policy_loss(dataclasses.replace(batch, logp=logp), settings), has_aux=True
  )(batch.logp)
  np.testing.assert_allclose([value, gradient[0]], [loss, slope], rtol=1e-6)
  assert totals.sums["clip_fraction"] == clipped
  assert totals.sums["clip_low_fraction"] == (clipped if ratio < 1 else 0)
  assert totals.sums["clip_high_fraction"] == (clipped if ratio > 1 else 0)
  np.testing.assert_allclose(totals.maxima["log_ratio_abs_max"], abs(np.log(ratio)), rtol=1e-5)
  np.testing.assert_allclose([totals.sums["ratio_mean"], totals.maxima["ratio_max"]], ratio, rtol=1e-6)


def test_kl_of_a_coin_by_hand():
  """π = (3/4, 1/4), π_ref = (1/2, 1/2), every arm once: exact expectations of the estimators are weighted by π."""
  p, q = np.array([0.75, 0.25]), np.array([0.5, 0.5])
  d = jnp.log(jnp.asarray(q / p))
  exact = float(np.sum(p * np.log(p / q)))
  np.testing.assert_allclose(np.sum(p * k1(d)), exact, rtol=1e-6)
  np.testing.assert_allclose(np.sum(p * k3(d)), exact, rtol=1e-6)
  np.testing.assert_allclose(np.sum(p * k2(d)), 0.5 * np.sum(p * np.log(q / p) ** 2), rtol=1e-6)
  assert np.all(np.asarray(k3(d)) >= 0)


@pytest.mark.parametrize(
  ("estimator", "kind"), [(k1, "nothing"), (k2, "reverse"), (k3, "forward")], ids=["k1", "k2", "k3"]
)
def test_gradients_of_the_estimators_against_enumeration(estimator, kind):
  """As a loss on sampled tokens, averaged over all arms of a categorical with their probabilities.

  k1 has no gradient on average; that of k2 is exactly ∇KL(π‖π_ref); that of k3 is ∇KL(π_ref‖π), which
  agrees with it where the two policies meet.
  """
  logits = jnp.array([0.3, -0.8, 1.1, 0.0])
  reference = jax.nn.log_softmax(jnp.array([-0.5, 0.2, 0.9, 0.4]))

  def sampled(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * estimator(reference - logp))

  def exact(logits):
    logp = jax.nn.log_softmax(logits)
    reverse = jnp.sum(jnp.exp(logp) * (logp - reference))
    forward = jnp.sum(jnp.exp(reference) * (reference - logp))
    return {"nothing": 0.0 * jnp.sum(logp), "reverse": reverse, "forward": forward}[kind]

  np.testing.assert_allclose(jax.grad(sampled)(logits), jax.grad(exact)(logits), atol=1e-6)


def test_k3_and_the_reverse_kl_pull_the_same_way_near_the_reference():
  reference = jnp.array([0.1, -0.2, 0.1])
  logits = reference + 1e-2 * jnp.array([1.0, 0.0, -1.0])

  def pull(estimator):
    def loss(z):
      logp = jax.nn.log_softmax(z)
      return jnp.sum(jax.lax.stop_gradient(jnp.exp(logp)) * estimator(jax.nn.log_softmax(reference) - logp))

    return jax.grad(loss)(logits)

  np.testing.assert_allclose(pull(k3), pull(k2), atol=0.01 * float(jnp.max(jnp.abs(pull(k2)))))


def test_kl_term_and_its_metrics_by_hand():
  """d = −0.5 for one token of one: loss is 0.02 · (e^−0.5 − 1 + 0.5), its slope 0.02 · (1 − e^−0.5)."""
  batch = tokens([-1.0], [0.0], reference_logp=[-1.5])

  def loss(logp):
    return policy_loss(dataclasses.replace(batch, logp=logp), LossSettings(kl_coefficient=0.02))

  (value, totals), gradient = jax.value_and_grad(loss, has_aux=True)(batch.logp)
  expected = float(np.exp(-0.5)) - 0.5
  np.testing.assert_allclose(value, 0.02 * expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, [0.02 * (1 - np.exp(-0.5))], rtol=1e-5)
  kls = [float(totals.sums[name]) for name in ("kl", "kl_k1", "kl_k2")]
  np.testing.assert_allclose(kls, [expected, 0.5, 0.125], rtol=1e-5)


@pytest.mark.parametrize(
  ("garbage", "jit"), [(200.0, False), *((value, True) for value in (200.0, -200.0, np.inf, -np.inf, np.nan))]
)
def test_masked_columns_may_hold_anything(garbage, jit):
  """Value and gradient are those of the batch without the masked column, for a difference of 200 and worse."""
  clean = tokens([[-1.0]], [[0.5]], old_logp=[[-1.1]], reference_logp=[[-1.3]], sampler_logp=[[-1.0]])
  junk = tokens(
    [[-1.0, garbage]],
    [[0.5, garbage]],
    mask=[[True, False]],
    old_logp=[[-1.1, -garbage]],
    reference_logp=[[-1.3, -garbage]],
    sampler_logp=[[-1.0, garbage]],
  )
  junk = dataclasses.replace(junk, entropy=jnp.array([[1.0, garbage]]))

  def run(batch):
    def loss(logp):
      return policy_loss(dataclasses.replace(batch, logp=logp), LossSettings())

    return (jax.jit if jit else lambda f: f)(jax.value_and_grad(loss, has_aux=True))(batch.logp)

  (value, totals), gradient = run(junk)
  (expected, expected_totals), expected_gradient = run(clean)
  assert value == expected
  np.testing.assert_array_equal(gradient, [[expected_gradient[0, 0], 0.0]])
  jax.tree.map(np.testing.assert_array_equal, totals, expected_totals)


@pytest.mark.parametrize(("gap", "clamped"), [(200.0, 0.5), (-200.0, 0.0)])
def test_a_log_ratio_of_200_stays_finite(gap, clamped):
  batch = tokens([-1.0, -1.0], [1.0, -1.0], old_logp=[-1.0 - gap, -1.0], reference_logp=[-1.0 + gap, -1.0])
  (value, totals), gradient = jax.value_and_grad(
    lambda logp: policy_loss(dataclasses.replace(batch, logp=logp), LossSettings()), has_aux=True
  )(batch.logp)
  assert np.isfinite(value)
  assert np.isfinite(gradient).all()
  assert totals.sums["clamped_fraction"] == clamped


def test_a_policy_far_above_the_reference_is_still_pulled_back():
  assert jax.grad(k3)(-50.0) == -1  # in d = log π_ref − log π: the loss falls as π falls
  assert jax.grad(k3)(50.0) == 0
  assert np.isfinite(k3(1e30))


def test_normalisations_differ_on_rows_of_unequal_length():
  """Rows of 2 and 8 tokens with a loss of 1 and 3 each. Token: 26/10. Sequence: (1 + 3)/2. Constant 10: 26/20."""
  mask = np.arange(8) < np.array([[2], [8]])
  per_token = np.array([[-1.0], [-3.0]]) * np.ones(8)
  for normalisation, expected in {"token": 2.6, "sequence": 2.0, "constant": 1.3}.items():
    value, _ = policy_loss(tokens(np.full((2, 8), -1.0), per_token, mask, normalisation), PLAIN)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_rows_without_tokens_count_nowhere():
  mask = np.array([[True, True], [False, False], [True, False]])
  np.testing.assert_allclose(token_weights(jnp.asarray(mask), "token"), mask / 3)
  np.testing.assert_allclose(token_weights(jnp.asarray(mask), "sequence"), [[0.25, 0.25], [0, 0], [0.5, 0]])
  np.testing.assert_allclose(token_weights(jnp.asarray(mask), "constant", 4), mask / 8)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
def test_nothing_to_train_on_is_zero_not_nan(normalisation):
  batch = tokens([[-1.0, -2.0]], [[1.0, 1.0]], [[False, False]], normalisation, reference_logp=[[-1.0, -1.0]])
  value, totals = policy_loss(batch, LossSettings())
  assert value == 0
  assert all(total == 0 for total in jax.tree.leaves(totals))


def test_sampler_gap_by_hand():
  batch = tokens([-1.0, -2.0, -3.0, -4.0], [0.0] * 4, [1, 1, 1, 0], sampler_logp=[-1.0, -2.5, -2.95, 9.0])
  _, totals = policy_loss(batch, PLAIN)
  np.testing.assert_allclose(totals.sums["sampler_gap_mean"], 0.55 / 3, rtol=1e-5)
  np.testing.assert_allclose(totals.sums["sampler_gap_over_tenth"], 1 / 3, rtol=1e-6)
  np.testing.assert_allclose(totals.maxima["sampler_gap_max"], 0.5, rtol=1e-6)


def test_bfloat16_log_probabilities_are_compared_in_float32():
  batch = tokens([-0.5], [1.0], old_logp=[-0.5003])
  _, totals = policy_loss(batch, PLAIN)
  np.testing.assert_allclose(totals.sums["ratio_mean"], np.exp(3e-4), rtol=1e-6)
  assert jnp.bfloat16(-0.5003) == jnp.bfloat16(-0.5)  # why


def test_all_bad_settings_are_named_at_once():
  found = LossSettings(
    clip_low=1.5, clip_high=-1, kl_coefficient=-1, normalisation="constant", temperature=0
  ).problems()
  assert [problem.split(":")[0] for problem in found] == [
    "constant_length",
    "clip_low",
    "clip_high",
    "kl_coefficient",
    "temperature",
  ]
  assert not LossSettings().problems()
