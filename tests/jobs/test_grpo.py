"""Parts of the training loop that decide what a step learns from, and when a run ends."""

import json

import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax.io.clock import Clock
from attrimem_jax.jobs.grpo import Trainer
from attrimem_jax.rl.experience import Group


class _Drawn(Trainer):
  """A trainer whose rollouts have given rewards: `rewards[draw][place]` are those of one group."""

  def __init__(self, redraw, rewards):
    self.config = schema.default()
    self.config.rl.redraw = redraw
    self.tasks, self.rewards, self.asked = self, rewards, []

  def training(self, step, draw=0):
    self.asked.append((step, draw))
    return [f"{draw}{place}" for place in range(len(self.rewards[draw]))]

  def _write(self, step, params, tasks):
    return tasks

  def _answer(self, tasks, groups):
    assert tasks == groups
    scores = [np.array(self.rewards[int(task[0])][int(task[1])], float)[:, None] for task in tasks]
    return [Group(tuple("ab"), (), score) for score in scores]


FLAT, APART, LOST = (1.0, 1.0), (0.0, 1.0), (np.nan, np.nan)


@pytest.mark.parametrize(
  ("redraw", "rewards", "tasks", "draws"),
  [
    (0, [[FLAT, APART]], ["00", "01"], 1),
    (2, [[APART, APART], [APART, APART], [APART, APART]], ["00", "01"], 1),
    (1, [[FLAT, APART, LOST], [FLAT, APART, APART]], ["11", "01", "12"], 2),
    (1, [[FLAT, FLAT], [FLAT, APART]], ["11", "01"], 2),  # one stays flat: no more draws
    (2, [[FLAT, FLAT], [FLAT, APART], [APART, APART]], ["11", "20"], 3),
  ],
)
def test_later_draws_take_the_places_of_flat_groups(redraw, rewards, tasks, draws):
  trainer = _Drawn(redraw, rewards)
  found, groups, drawn = trainer._experience(7, None, Clock())
  assert found == tasks
  assert trainer.asked == [(7, draw) for draw in range(draws)]
  assert len(drawn) == draws * len(tasks)
  for task, group in zip(tasks, groups, strict=True):
    np.testing.assert_array_equal(group.rewards, rewards[int(task[0])][int(task[1])])


@pytest.mark.slow
def test_a_run_that_collapses_ends_and_keeps_no_step_that_showed_it(command, tmp_path):
  """No entropy is above 1,000: both steps show the sign, and a third is never made."""
  overrides = ("--config.train.collapse.patience=2", "--config.train.collapse.entropy=1000.0")
  process = command(tmp_path, *overrides)
  output, _ = process.communicate(timeout=240)
  assert process.returncode == 0, output
  assert "step 2: the policy collapsed, its entropy is beyond config.train.collapse.entropy=1000.0" in output
  steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  assert steps == [0, 1, 2]
  assert not [path for path in (tmp_path / "checkpoints").glob("*") if path.name.isdigit()]
