"""Batches of supervised examples are functions of the seed and their number, and fit or say why not."""

import numpy as np
import pytest

from attrimem_jax import config as schema
from attrimem_jax.io import models
from attrimem_jax.jobs.sft import Examples
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
