"""`write_report` on whole, partial and damaged run directories."""

import json
import math
import pathlib
import re

import pytest

import attrimem_jax
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.view.report import write_report

TOKENIZER = pathlib.Path(attrimem_jax.__file__).parent / "assets" / "tokenizer"


def _call(text, ids, **changes):
  row = {
    "session": 0, "module": "semantic", "finish": "stop", "text": text, "ids": ids, "logps": [-0.1] * len(ids),
    "actions": [{"line": text, "reason": "ok"}], "attribution": [0.5, *[None] * (len(ids) - 1)], "outcome": 1.0,
    "advantages": [1.0, *[-0.5] * (len(ids) - 1)],
  }  # fmt: skip
  return row | changes


def _rollout(number, reward, calls):
  answers = [{"question": "Where <b>does</b> Ann live?", "gold": ["Lisbon"], "answer": "In Lisbon.", "score": 1.0}]
  return {"history": "h", "rollout": number, "reward": reward, "memory": [], "answers": answers, "calls": calls}


@pytest.fixture
def run(tmp_path):
  """A run of three steps with an evaluation before and after, and two rollouts, one of them refused."""
  ids = Tokenizer.load(TOKENIZER).encode("ADD Ann lives in Lisbon\n")
  (tmp_path / "config.json").write_text(json.dumps({"job": "train", "seed": 0, "policy": {"model": "no/such model"}}))
  rows = [{"step": 0, "eval/accuracy": 0.25, "eval/accuracy_low": 0.2, "eval/accuracy_high": 0.3, "eval/questions": 40}]
  for step in (1, 2, 3):
    rows.append(
      {"step": step, "train/reward": 0.1 * step, "train/kl": 0.0, "time/write": 3.0 / step, "time/update": 1.0}
    )
  rows.append(rows[0] | {"step": 3, "eval/accuracy": 0.5, "eval/accuracy_high": None})
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  refused = _call("ADD", ids[:1], actions=[{"line": "ADD", "reason": "empty_text"}])
  rollouts = [_rollout(0, 0.0, [refused]), _rollout(1, 1.0, [_call("ADD Ann lives in Lisbon\n", ids)])]
  (tmp_path / "rollouts").mkdir()
  for step in (2, 3):
    text = "".join(json.dumps(row) + "\n" for row in rollouts[: step - 1])
    (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(text)
  return tmp_path


def test_a_whole_run(run):
  config = json.loads((run / "config.json").read_text())
  config["policy"]["model"] = str(TOKENIZER)
  (run / "config.json").write_text(json.dumps(config))
  path = write_report(run)
  page = path.read_text()
  assert path == run / "report.html"
  assert "went from 0.250 [0.200, 0.300] at step 0 to <b>0.500</b> at step 3 on 40 questions" in page
  assert "a difference of <b>+0.250</b>" in page
  assert "Rollouts of step 3" in page
  assert page.index("rollout 1: reward 1.000") < page.index("rollout 0: reward 0.000")
  assert "refused: ADD (empty_text)" in page
  assert "Where &lt;b&gt;does&lt;/b&gt; Ann live?" in page
  assert 'title="attribution +0.5"' in page
  assert 'title="advantage -0.5"' in page
  assert page.count("<svg") == 2
  assert "http" not in page.replace("http://www.w3.org/2000/svg", "")  # needs no other file


def test_the_strongest_tokens_come_first(run):
  """Of equal probabilities the advantage decides: 1 before the others' -0.5; an unlikely token comes before both."""
  ids = Tokenizer.load(TOKENIZER).encode("ADD Ann lives in Lisbon\n")
  config = json.loads((run / "config.json").read_text()) | {"policy": {"model": str(TOKENIZER)}}
  (run / "config.json").write_text(json.dumps(config))
  calls = [_call("ADD Ann lives in Lisbon\n", ids, logps=[-0.1] * (len(ids) - 1) + [-3.0])]
  (run / "rollouts" / "step_000004.jsonl").write_text(json.dumps(_rollout(0, 1.0, calls)) + "\n")
  page = write_report(run).read_text()
  table = page[page.index("Tokens that push most") : page.index("rollout 0: reward")]
  pushes = [float(cell) for cell in re.findall(r"<tr><td [^>]*>([\d.]+)</td>", table)]
  assert len(pushes) == min(12, len(ids))
  assert pushes[:3] == pytest.approx(
    [0.5 * (1 - math.exp(-3)), 1 - math.exp(-0.1), 0.5 * (1 - math.exp(-0.1))], rel=0.01
  )


def test_times_leave_the_first_step_out_of_the_mean(run):
  page = write_report(run).read_text()
  row = page[page.index(">write<") :].split("</tr>")[0]
  assert [">3.00<" in row, ">1.25<" in row, ">56%<" in row] == [True] * 3  # (1.5 + 1) / 2, and 1.25 of 2.25


def test_without_the_tokenizer_the_text_is_shown_plainly(run):
  page = write_report(run).read_text()
  assert "tokenizer is not at hand" in page
  assert "ADD Ann lives in Lisbon" in page


@pytest.mark.parametrize("missing", ["config.json", "metrics.jsonl", "rollouts/step_000003.jsonl"])
def test_a_missing_part_leaves_the_rest(run, missing):
  (run / missing).unlink()
  assert "<h1>Run" in write_report(run).read_text()


def test_an_empty_directory(tmp_path):
  page = write_report(tmp_path).read_text()
  assert "No metrics yet." in page
  assert "No rollouts" in page


def test_a_line_that_was_cut_off_is_left_out(run):
  with (run / "metrics.jsonl").open("a") as file:
    file.write('{"step": 4, "train/rew')
  assert "Held-out accuracy went" in write_report(run).read_text()


def test_no_directory(tmp_path):
  with pytest.raises(ValueError, match=r"no run directory at .*nowhere.*give the --workdir"):
    write_report(tmp_path / "nowhere")
