"""Logs of a run: rows, their removal on resume, rollouts, the progress line."""

import io
import json
import math

import numpy as np
import pytest

from attrimem_jax.io import metrics


def rows(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_begins_with_its_step_and_has_null_for_what_is_not_finite(tmp_path):
  with metrics.MetricsWriter(tmp_path, None) as writer:
    writer.write(3, {"train/loss": np.float32(0.5), "train/kl": math.nan, "train/grad": math.inf})
  text = (tmp_path / "metrics.jsonl").read_text()
  assert text == '{"step": 3, "train/loss": 0.5, "train/kl": null, "train/grad": null}\n'
  assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_resume_drops_later_rows_and_the_torn_last_line(tmp_path):
  with metrics.MetricsWriter(tmp_path, None) as writer:
    for step in range(1, 6):
      writer.write(step, {"loss": step})
    metrics.write_rollouts(tmp_path, 3, [{"a": 1}])
    metrics.write_rollouts(tmp_path, 4, [{"a": 1}])
  path = tmp_path / "metrics.jsonl"
  path.write_text(path.read_text() + '{"step": 2, "lo')
  (tmp_path / "rollouts" / "step_notes.jsonl").write_text("mine")
  with metrics.MetricsWriter(tmp_path, 3) as writer:
    writer.write(4, {"loss": -4})
  assert [(row["step"], row["loss"]) for row in rows(path)] == [(1, 1), (2, 2), (3, 3), (4, -4)]
  names = sorted(file.name for file in (tmp_path / "rollouts").iterdir())
  assert names == ["step_000003.jsonl", "step_notes.jsonl"]


def test_a_complete_last_row_without_its_line_end_is_kept(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}')
  with metrics.MetricsWriter(tmp_path, 1) as writer:
    writer.write(2, {"loss": 2})
  assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2]


def test_starting_afresh_forgets_an_earlier_run(tmp_path):
  for _ in range(2):
    with metrics.MetricsWriter(tmp_path, None) as writer:
      writer.write(0, {"loss": 1})
  assert len(rows(tmp_path / "metrics.jsonl")) == 1


def test_a_foreign_line_is_refused_by_its_place_and_left_alone(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl:2: b'hello' is not a row"):
    metrics.MetricsWriter(tmp_path, 2)
  assert "hello" in path.read_text()


def test_a_metric_called_step_is_refused(tmp_path):
  with metrics.MetricsWriter(tmp_path, None) as writer, pytest.raises(ValueError, match="rename it"):
    writer.write(1, {"step": 2.0})


def test_rollouts_hold_any_text_and_numpy_values(tmp_path):
  row = {
    "text": "猫\ud800\n\u2028",
    "reward": np.float32(0.5),
    "tokens": np.arange(2),
    "gap": [math.nan],
    "more": {"a": ()},
  }
  path = metrics.write_rollouts(tmp_path, 12, [row, {}])
  assert path == tmp_path / "rollouts" / "step_000012.jsonl"
  assert rows(path) == [
    {"text": "猫\ud800\n\u2028", "reward": 0.5, "tokens": [0, 1], "gap": [None], "more": {"a": []}},
    {},
  ]
  assert not list(path.parent.glob("*.tmp"))


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture
def clock(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
  return now


def test_progress_gives_plain_lines_to_a_file(clock):
  stream = io.StringIO()
  with metrics.Progress(10, 200, unit="window", stream=stream) as progress:
    progress.show(10, {})
    clock[0] += 20
    progress.show(20, {"loss": 0.123456})
    clock[0] += 1
    progress.show(120, {})
  lines = ["10/200", "20/200  loss 0.1235  2.0 s/window  6:00 left", "120/200  5.2 windows/s  0:15 left", ""]
  assert stream.getvalue().split("\n") == lines


def test_progress_forgets_slow_first_steps(clock):
  stream = io.StringIO()
  progress = metrics.Progress(0, 10_000, stream=stream)
  clock[0] += 1000
  for step in range(1, 31):
    progress.show(step, {})
    clock[0] += 0.25
  assert stream.getvalue().splitlines()[-1] == "30/10000  4.0 steps/s  41:32 left"


def test_progress_overwrites_its_line_on_a_terminal(clock):
  stream = Terminal()
  with metrics.Progress(0, 5, unit="window", stream=stream) as progress:
    progress.show(1, {"loss": 1.25})
    progress.show(2, {})
  assert stream.getvalue() == "\r1/5  loss 1.25\r" + "2/5".ljust(14) + "\n"


def test_long_times_have_hours():
  assert metrics._clock(3661) == "1:01:01"
