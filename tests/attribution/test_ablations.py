import itertools

import numpy as np
import pytest

from attrimem_jax.attribution.ablations import ablate, draw, masks_at

SCHEDULE = ((0, 8), (80, 16), (200, 32))


def rng(seed: int = 0) -> np.random.Generator:
  return np.random.default_rng(seed)


def test_masks_of_an_early_stage_are_the_first_of_a_later_one():
  stages = [draw(rng(), masks, 21) for masks in (8, 16, 32)]
  for few, many in itertools.pairwise(stages):
    np.testing.assert_array_equal(many[: len(few)], few)
  assert len({row.tobytes() for row in stages[-1]}) == 32


def test_masks_keep_the_asked_fraction_and_are_not_correlated():
  masks = draw(rng(), 400, 500, keep=0.7).astype(float)
  assert abs(masks.mean() - 0.7) < 0.01  # 200,000 draws: 10 standard errors
  correlation = np.corrcoef(masks[:, :50].T)[np.triu_indices(50, 1)]
  assert np.abs(correlation).mean() < 0.06  # 400 rows: expected 0.04


def test_masks_without_sources_or_rows():
  assert draw(rng(), 3, 0).shape == (3, 0)
  assert draw(rng(), 0, 5).shape == (0, 5)


@pytest.mark.parametrize(("step", "masks"), [(0, 8), (79, 8), (80, 16), (199, 16), (200, 32), (10_000, 32)])
def test_published_schedule(step, masks):
  assert masks_at(step, SCHEDULE) == masks


def test_ablation_by_hand():
  # Source 0 stands at two places; template ids (source -1) always stay.
  ids, source = np.array([7, 10, 11, 8, 10, 9], np.int32), np.array([-1, 0, 1, -1, 0, -1], np.int32)
  rows = ablate(ids, source, np.array([[True, True], [False, True], [True, False], [False, False]]))
  assert [row.tolist() for row in rows] == [[7, 10, 11, 8, 10, 9], [7, 11, 8, 9], [7, 10, 8, 10, 9], [7, 8, 9]]
  assert all(row.dtype == np.int32 for row in rows)


def test_ablation_against_a_loop():
  ids, source = rng(1).integers(0, 99, 40).astype(np.int32), rng(2).integers(-1, 12, 40)
  masks = draw(rng(3), 30, 12)
  for mask, row in zip(masks, ablate(ids, source, masks), strict=True):
    assert row.tolist() == [i for i, s in zip(ids, source, strict=True) if s < 0 or mask[s]]


def test_a_prompt_without_sources_stays_as_it_is():
  ids = np.arange(4, dtype=np.int32)
  rows = ablate(ids, np.full(4, -1), np.zeros((2, 0), bool))
  assert [row.tolist() for row in rows] == [[0, 1, 2, 3]] * 2
