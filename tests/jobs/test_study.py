"""Studies: what is compared, what the numbers are, and that a study which was stopped ends as one that was not."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from attrimem_jax import config as schema
from attrimem_jax import validation
from attrimem_jax.arms import ARMS, arm_config
from attrimem_jax.data import synthetic
from attrimem_jax.jobs import study
from attrimem_jax.view.study import write_page, write_pictures

RECIPE = pathlib.Path(__file__).parents[2] / "configs" / "study_granularity.py"


def made(arm: str, seed: int, before: dict, after: dict, reward=(0.2, 0.4)) -> dict:
  """A run of two evaluations; scores are {history: [sum, questions]}."""

  def evaluation(step, scores):
    accuracy = sum(s for s, _ in scores.values()) / sum(n for _, n in scores.values())
    return {"step": step, "accuracy": accuracy, "memory_tokens": 10.0, "rejected": 0.1, "scores": scores}

  curves = {name: list(reward) for name in study.CURVES}
  return {"arm": arm, "seed": seed, "evaluations": [evaluation(0, before), evaluation(2, after)], "curves": curves,
          "seconds": 3}  # fmt: skip


START = {"a": [1.0, 4], "b": [1.0, 4]}
RUNS = [
  made("outcome", 0, START, {"a": [2.0, 4], "b": [2.0, 4]}),
  made("outcome", 1, START, {"a": [2.0, 4], "b": [2.0, 4]}),
  made("token", 0, START, {"a": [3.0, 4], "b": [3.0, 4]}),
  made("token", 1, START, {"a": [3.0, 4], "b": [4.0, 4]}),
  made("token", 2, START, {"a": [4.0, 4], "b": [4.0, 4]}),
]


def test_every_arm_is_a_valid_run_that_differs_only_where_it_says():
  config = schema.recipe(RECIPE)
  validation.validate(config)
  base = schema.flat(arm_config(config, "token", 3).to_dict())
  assert base["job"] == "train"
  assert base["seed"] == 3
  for name, changes in ARMS.items():
    arm = arm_config(config, name, 3)
    validation.validate(arm)
    found = schema.flat(arm.to_dict())
    assert {key for key in base if base[key] != found[key]} == set(changes)


def test_bad_arms_are_told():
  config = schema.recipe(RECIPE)
  for arms, message in (((), "names no arm"), (("tokne",), "no arm 'tokne'"), (("token", "token"), "twice")):
    config.study.arms = arms
    with pytest.raises(ValueError, match=message):
      validation.validate(config)
  config.study.arms = ("gradients",)
  config.attribution.keep = 2.0
  with pytest.raises(ValueError, match=r"attribution\.keep"):
    validation.validate(config)


def test_numbers_by_hand():
  found = study.summarise(RUNS, samples=500)
  assert found["arms"]["outcome"]["accuracy"]["mean"] == 0.5
  assert found["arms"]["token"]["accuracy"]["mean"] == pytest.approx((6 + 7 + 8) / 24)
  assert found["arms"]["token"]["by_seed"] == [0.75, 0.875, 1.0]
  difference = found["differences"]["token - outcome"]  # of the seeds 0 and 1 that both have
  assert difference["seeds"] == [0, 1]
  assert difference["by_seed"] == [0.25, 0.375]
  assert difference["mean"] == pytest.approx(0.3125)
  assert 0.25 <= difference["low"] <= difference["mean"] <= difference["high"] <= 0.5
  # Two runs that differ by 1/8: half a width of t(0.975, 1) = 12.7062 times (1/8/√2)/√2 = 1/16.
  half = 12.7062 / 16
  assert [difference["t_low"], difference["t_high"]] == pytest.approx([0.3125 - half, 0.3125 + half], rel=1e-4)
  assert found["over_training"]["token - outcome"]["by_seed"] == [0.25, 0.375]  # one evaluation after the start
  # From 0.25 at step 0 the token arm reaches 0.875 at step 2: the outcome's 0.5 lies at 0.8 of a step.
  assert found["arms"]["token"]["steps_to_outcome"] == pytest.approx(2 * 0.25 / 0.625)
  assert found["arms"]["outcome"]["steps_to_outcome"] == 2
  assert found["curves"]["token"]["accuracy"][1] == [2, pytest.approx(0.875), 0.75, 1.0]
  assert found["curves"]["token"]["reward"] == [pytest.approx([1, 0.2, 0.2, 0.2]), pytest.approx([2, 0.4, 0.4, 0.4])]


def test_an_arm_that_is_early_but_ends_alike_is_ahead_over_training():
  early, late = (made(arm, 0, START, {"a": [3.0, 4], "b": [3.0, 4]}) for arm in ("token", "outcome"))
  for run, middle in ((early, 3.0), (late, 1.0)):
    run["evaluations"].insert(1, run["evaluations"][0] | {"step": 1, "scores": {"a": [middle, 4], "b": [middle, 4]}})
  found = study.summarise([early, late], samples=100)
  assert found["differences"]["token - outcome"]["mean"] == 0
  assert found["over_training"]["token - outcome"]["mean"] == (0.75 + 0.75) / 2 - (0.25 + 0.75) / 2
  assert found["differences"]["token - outcome"]["t_low"] is None


def test_kinds_of_questions_by_hand():
  """Two kinds: on the one the arms differ by a half, on the other not at all; a run without kinds counts nowhere."""
  runs = [dict(run) for run in RUNS]
  for run, asked in zip(runs, (1.0, 1.0, 2.0, 2.0), strict=False):
    run["kinds"] = {"new": {"a": [asked, 2]}, "old": {"a": [1.0, 2], "b": [1.0, 2]}}
  found = study.summarise(runs, samples=500)["kinds"]
  assert found["new"]["arms"]["outcome"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
  assert found["new"]["arms"]["token"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
  assert found["new"]["differences"]["token - outcome"]["by_seed"] == [0.5, 0.5]
  assert found["old"]["differences"]["token - outcome"]["mean"] == 0.0
  assert study.summarise(RUNS, samples=500)["kinds"] == {}


def test_scores_and_kinds_of_a_run_come_from_its_answers(tmp_path):
  answers = [
    {"history": "a", "kind": "x", "score": 1.0},
    {"history": "a", "kind": "y", "score": 0.0},
    {"history": "b", "kind": "x", "score": 0.5},
  ]
  rows = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 1, "train/reward": 0.25, "time/write": 2.0, "time/update": 3.0},
    {"step": 1, "eval/accuracy": 0.5, "eval/needed_tokens": 0.75},
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (tmp_path / "evaluations").mkdir()
  for step in (0, 1):
    lines = "".join(json.dumps(row) + "\n" for row in answers)
    (tmp_path / "evaluations" / f"step_{step:06d}.jsonl").write_text(lines)
  found = study.result("token", 4, tmp_path)
  scores = {"a": [1.0, 2], "b": [0.5, 1]}
  assert found["evaluations"][1] == {"step": 1, "accuracy": 0.5, "needed_tokens": 0.75, "scores": scores}
  assert found["kinds"] == {"x": {"a": [1.0, 1], "b": [0.5, 1]}, "y": {"a": [0.0, 1]}}
  assert found["curves"]["reward"] == [0.25]
  assert found["seconds"] == 5


def test_runs_that_were_asked_different_questions_are_not_compared():
  with pytest.raises(ValueError, match="different questions"):
    study.summarise([*RUNS, made("token", 3, START, {"a": [1.0, 4], "c": [1.0, 4]})])


def test_page_and_table_say_the_same(tmp_path):
  summary = study.summarise(RUNS, samples=500)
  write_page(tmp_path / "study.html", summary)
  pictures = [path.name for path in write_pictures(tmp_path, summary)]
  assert pictures == ["curves.png", "differences.png"]
  assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
  page, text = (tmp_path / "study.html").read_text(), study.table(summary)
  for part in ("outcome", "token - outcome", "0.875 ["):
    assert part in page
    assert part in text
  assert "+0.312" in text
  assert "(0 is outside)" in text
  assert page.count("<svg") == 6  # two of differences, and two curves for each of two arms


@pytest.mark.parametrize(
  "text", ["{", "[]", '{"runs": 5}', '{"runs": [{}]}', '{"runs": [{"arm": "token", "seed": 0}]}']
)
def test_a_damaged_study_is_told(tmp_path, text):
  (tmp_path / "study.json").write_text(text)
  with pytest.raises(ValueError, match=r"study\.json is damaged"):
    study.read_results(tmp_path / "study.json")


def test_the_published_runs_are_read_and_say_what_the_readme_says(repository):
  summary = study.summarise(study.read_results(repository / "launch" / "study_granularity.json"), samples=200)
  for arm, seeds, accuracy in (("start", 5, 0.425), ("outcome", 5, 0.649), ("action", 5, 0.664), ("token", 5, 0.656)):
    assert len(summary["arms"][arm]["seeds"]) == seeds
    assert round(summary["arms"][arm]["accuracy"]["mean"], 3) == accuracy
  assert round(summary["differences"]["token - outcome"]["mean"], 3) == 0.007


def test_a_study_that_was_stopped_ends_as_one_that_was_not(tmp_path, tiny, environment, repository):
  policy, answer = tiny
  small = {
    "policy.model": policy, "answer.model": answer, "study.arms": "('start','outcome','token')", "study.seeds": 1,
    "eval.episodes": 2, "eval.questions": 2, "rollout.group_size": 2, "rollout.histories": 2,
    "rollout.max_new_tokens": 8, "answer.max_new_tokens": 8, "reward.questions": 2, "train.steps": 3,
    "train.eval_every": 2, "train.checkpoint_every": 1, "optim.lr": 0.01, "rl.redraw": 1,
  }  # fmt: skip
  arguments = [f"--config.{name}={value}" for name, value in small.items()]

  def start(workdir):
    command = [sys.executable, "-m", "attrimem_jax.main", f"--config={RECIPE}", f"--workdir={workdir}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=repository, env=environment, **pipes)

  whole = start(tmp_path / "whole")
  text, _ = whole.communicate(timeout=240)
  assert whole.returncode == 0, text
  stopped = start(tmp_path / "stopped")
  for line in stopped.stdout:
    if line.startswith("1/3  reward"):
      stopped.send_signal(signal.SIGTERM)
      break
  rest, _ = stopped.communicate(timeout=240)
  assert stopped.returncode == 0, rest
  found = study.read_results(tmp_path / "stopped" / "study.json")
  assert [r["arm"] for r in found] == ["start"], rest
  again = start(tmp_path / "stopped")
  text, _ = again.communicate(timeout=240)
  assert again.returncode == 0, text
  contents = []
  for name in ("whole", "stopped"):
    runs = json.loads((tmp_path / name / "study.json").read_text())["runs"]
    contents.append([{k: v for k, v in run.items() if k != "seconds"} for run in runs])
  assert contents[0] == contents[1]
  assert [run["arm"] for run in contents[0]] == ["start", "outcome", "token"]
  assert set(contents[0][-1]["kinds"]) <= set(synthetic.KINDS)
  arguments.append("--config.rl.kl=0.5")
  other = start(tmp_path / "whole")
  text, _ = other.communicate(timeout=60)
  assert other.returncode != 0
  assert "holds a run of another configuration (rl.kl: 0.02 there, 0.5 now)" in text
