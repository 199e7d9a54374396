import pytest

from attrimem_jax.rl.collapse import Limits, collapsed, signs

LIMITS = Limits(patience=2, entropy=0.1, kl=5.0, reward=0.2)


def row(entropy=1.0, kl=0.1, reward=0.5):
  return {"train/entropy": entropy, "train/kl": kl, "train/reward": reward}


@pytest.mark.parametrize(
  ("change", "found"),
  [
    ({}, set()),
    ({"entropy": 0.05}, {"entropy"}),
    ({"kl": 6.0}, {"kl"}),
    ({"reward": 0.1, "kl": 6.0}, {"kl", "reward"}),
    ({"kl": None}, set()),
  ],
)
def test_signs(change, found):
  assert signs(row(**change), LIMITS) == found


def test_one_sign_must_last():
  good, flat, far = row(), row(entropy=0.0), row(kl=9.0)
  evaluation = {"eval/accuracy": 0.4}
  assert collapsed([good, flat, evaluation, flat], LIMITS) == "entropy"
  assert collapsed([flat, good, flat], LIMITS) == ""
  assert collapsed([flat, far], LIMITS) == ""  # not the same one
  assert collapsed([flat], LIMITS) == ""
  assert collapsed([], LIMITS) == ""
  assert collapsed([flat] * 9, Limits(0, 0.1, 5.0, 0.2)) == ""
