"""Batches of supervised examples are functions of the seed and their number, and fit or say why not."""

import json
import pathlib

import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax import validation
from attrimem_jax.io import models
from attrimem_jax.jobs.run import Run
from attrimem_jax.jobs.sft import Examples, run_sft, taught
from attrimem_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(models.SHIPPED_TOKENIZER)


def _examples(repository, preset: str, **widths) -> Examples:
  config = schema.recipe(repository / "configs" / "sft.py", preset)
  config.sft.widths.update(widths)
  return Examples(config, TOKENIZER)


@pytest.mark.parametrize("preset", ["policy", "answer", "dates"])
def test_a_batch_depends_on_its_number_alone(preset, repository):
  used, fresh = _examples(repository, preset), _examples(repository, preset)
  used.batch_of("train", 0, 4)
  one, other = used.batch_of("train", 3, 4), fresh.batch_of("train", 3, 4)
  np.testing.assert_array_equal(one.shared.suffix, other.shared.suffix)
  assert one.shared.prefix.shape[0] == 4
  assert not np.array_equal(one.shared.prefix, used.batch_of("train", 2, 4).shared.prefix)


def test_widths_that_hold_nothing_are_an_error_that_names_what_is_needed(repository):
  with pytest.raises(ValueError, match=r"hold 0 of the examples .* prefix of \d+, prompts of up to \d+ .* raise"):
    _examples(repository, "answer", prompt=2).batch_of("train", 0, 2)


def test_only_the_kinds_that_are_asked_for_are_taught(repository):
  batch = _examples(repository, "dates").batch_of("train", 0, 32)
  texts = [TOKENIZER.decode(row[mask].tolist()) for row, mask in zip(
    batch.shared.suffix.reshape(64, -1), batch.shared.suffix_mask.reshape(64, -1), strict=True)]  # fmt: skip
  asked = [text.strip() for text in texts if text]
  assert len(asked) > 32
  assert all(text.startswith(("When did", "On which day did", "Did ")) for text in asked)


def test_kinds_that_no_history_asks_for_are_an_error(repository):
  config = schema.recipe(repository / "configs" / "sft.py", "dates")
  config.data.kinds = ("multi-session",)
  config.data.synthetic.update(sessions=(1, 1), facts=(1, 1), questions=(1, 1))
  with pytest.raises(ValueError, match="no question of the kinds multi-session: lengthen"):
    Examples(config, TOKENIZER).batch_of("train", 0, 1)


def _taught(repository, tiny, endpoint, **values):
  """A warm start of one step on what the scripted endpoint teaches."""
  config = schema.recipe(repository / "configs" / "sft.py")
  config.policy.model, config.optim.name, config.optim.warmup = str(tiny[0]), "adamw", 0
  config.sft.teacher.update(url=endpoint.url, model="wise", **{"histories": 4, **values})
  config.sft.batch, config.train.steps, config.export.verify = 2, 1, False
  validation.validate(config)
  return config


def test_a_policy_learns_from_a_model_behind_an_endpoint(repository, tiny, endpoint, tmp_path, capsys):
  def script(body, number):
    semantic = "Semantic memory" in body["messages"][1]["content"]
    return f"ADD the fact of request {number}" if semantic else ""

  endpoint.script = script
  config = _taught(repository, tiny, endpoint)
  with Run(config, tmp_path) as run:
    run_sft(config, run)
    asked = len(endpoint.seen)
    path = taught(config, run, TOKENIZER)  # as when the run goes on: it asks nobody
  assert len(endpoint.seen) == asked
  rows = [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
  assert len(rows) == asked == 4 * sum(row["agent_type"] == "semantic" for row in rows)
  assert len({row["conversation_id"] for row in rows}) == 4
  printed = capsys.readouterr().out
  assert f"teacher wise: {asked} calls, 0 without a reply" in printed
  assert f"4 conversations, {asked // 4} sessions" in printed
  assert (tmp_path / "export" / "config.json").is_file()
  # Learned from elsewhere, as from any expert.
  config = schema.recipe(repository / "configs" / "sft.py")
  config.sft.path = path
  batch = Examples(config, TOKENIZER).batch_of("train", 0, 4).shared
  assert "the fact of request" in TOKENIZER.decode(batch.suffix[batch.suffix_mask].tolist())


def test_a_teacher_that_is_down_stops_before_the_first_step_and_what_it_said_is_kept(
  repository, tiny, endpoint, tmp_path
):
  endpoint.script = lambda body, number: "SKIP" if number <= 10 else (500, b"{}")
  config = _taught(repository, tiny, endpoint, retries=0, concurrency=1, histories=16)
  failing = pytest.raises(ValueError, match=r"the last 2\d requests to .* failed")
  with Run(config, tmp_path) as run, failing:
    run_sft(config, run)
  assert not (tmp_path / "metrics.jsonl").exists()
  first = len(endpoint.seen)
  endpoint.script = lambda body, number: "SKIP"
  with Run(config, tmp_path) as run:
    path = taught(config, run, TOKENIZER)
  rows = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  assert len(endpoint.seen) == first + len(rows) - 10


def test_a_teacher_needs_a_policy_to_teach_and_histories_to_write(repository):
  config = schema.recipe(repository / "configs" / "sft.py", "answer")
  config.sft.teacher.update(url="http://127.0.0.1:9/v1", model="m", histories=2)
  with pytest.raises(ValueError, match="2 problems") as found:
    validation.validate(config)
  assert "config.sft.teacher.url: teaches a policy to write" in str(found.value)
  assert "config.sft.teacher.histories: are all held out by config.data.holdout=2" in str(found.value)
