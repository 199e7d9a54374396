from attrimem_jax.view.terminal import bars, summary


def test_bars_rise_with_the_values_and_stay_flat_for_equal_ones():
  assert bars([0.0, 0.5, 1.0]) == "▁▅█"
  assert bars([2.0, 2.0]) == "▁▁"
  assert bars([]) == ""
  assert bars([None, float("nan"), 1.0]) == "▁"
  assert len(bars(list(range(1000)))) == 60


def test_summary_shows_first_and_last_accuracy_and_the_reward():
  rows = [
    {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.3},
    {"step": 1, "train/reward": 0.1},
    {"step": 2, "train/reward": 0.3},
    {"step": 2, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6},
  ]
  text = summary(rows)
  assert "0.250 [0.200, 0.300] → 0.500 [0.400, 0.600]" in text
  assert "▁█  0.100 → 0.300" in text
  assert "gain" not in text
  rows[-1] |= {"eval/gain": 0.25, "eval/gain_low": -0.01, "eval/gain_high": 0.4}
  assert "gain on the same questions: +0.250 [-0.010, +0.400]" in summary(rows)
  assert summary([]) == ""
