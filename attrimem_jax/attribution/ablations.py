"""Ablations: which sources stay in a context, and the ids that are left when the others are removed.

Masks of one problem come from one generator, row by row, so those of an early stage of the schedule are the first rows
of a later one: 8 masks are the first 8 of 16 (AttriMem: 8, 16, 32 from RL steps 0, 80, 200).
"""

from collections.abc import Sequence

import numpy as np


def draw(rng: np.random.Generator, masks: int, sources: int, keep: float = 0.5) -> np.ndarray:
  """Masks bool [M, S], True where a source stays; each entry is Bernoulli(`keep`), independent."""
  return rng.random((masks, sources)) < keep


def draw_pairs(rng: np.random.Generator, masks: int, sources: int, keep: float = 0.5) -> np.ndarray:
  """`draw` of which every other mask is the opposite of the one before: bool [M, S]."""
  drawn = draw(rng, -(-masks // 2), sources, keep)
  return np.stack([drawn, ~drawn], axis=1).reshape(2 * len(drawn), sources)[:masks]


LEVELS = (1 / 8, 1 / 2, 1 / 4, 1 / 16, 1.0)
"""Factors at which gradients are taken, the most telling first. At full strength attention is so sure of itself that a
derivative says little; their mean is close to the integral from nothing to full strength."""


def masks_at(step: int, schedule: Sequence[tuple[int, int]]) -> int:
  """Number of masks at RL step `step` for a schedule ((first step, masks), …) in rising order."""
  return max((stage for stage in schedule if stage[0] <= step), key=lambda stage: stage[0])[1]


def ablate(ids: np.ndarray, source: np.ndarray, keep: np.ndarray) -> list[np.ndarray]:
  """Removes sources from a prompt.

  Args:
    ids: int32 [T].
    source: int32 [T], index of the source that stands at a place, or -1: those places are never removed.
    keep: bool [M, S].

  Returns:
    M arrays of ids, kept tokens in their order.
  """
  return [ids[row] for row in stays(source, keep)]


def stays(source: np.ndarray, keep: np.ndarray) -> np.ndarray:
  """Which tokens stay under each mask, [M, T] like `keep`; those that are no source always do."""
  return np.concatenate([keep, np.ones((len(keep), 1), keep.dtype)], axis=1)[:, source]  # -1 finds the added column
