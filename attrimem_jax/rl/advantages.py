"""Rewards to advantages, in float64 NumPy on the host.

Â_{i,t,k} = Â_out,i + λ · Â_proc,{i,t,k}: an outcome advantage that every token of rollout i shares, and a process
advantage for
the tokens that are sources. Equal rewards give exactly 0: in float32 eight rewards of 0.7 have a standard deviation
of 6e-8 around a mean that is off by as much, so dividing by it (plus 1e-8) would push all eight by 0.86 in the same
direction.

Left out: leave-one-out baselines, sums over following tokens (a process reward belongs to its own token here).
"""

import dataclasses

import numpy as np

PROCESS_NORMALISATIONS = ("zscore", "scale", "none")

_FLAT = 1e-6


def flat(values: np.ndarray, valid: np.ndarray | None = None) -> bool:
  """Whether all valid values are equal up to rounding, max − min ≤ 1e-6 · max(1, max |value|); so are none and one."""
  values = np.asarray(values, np.float64) if valid is None else np.asarray(values, np.float64)[valid]
  return values.size < 2 or bool(np.ptp(values) <= _FLAT * max(1.0, np.abs(values).max()))


def outcome_advantages(rewards: np.ndarray, valid: np.ndarray | None = None, *, divide: bool = True) -> np.ndarray:
  """(R − mean) / std within each group; population standard deviation.

  A malformed rollout is valid: it has a low reward, counts in the mean and earns its negative advantage. Invalid is
  only what has
  no reward (a judge that failed, a completion without tokens): it leaves the group and gets 0, as does a group of
  equal rewards.

  Args:
    rewards: float[P, G], one row a group.
    valid: bool[P, G]; everything by default.
    divide: False leaves out the division by the standard deviation (Dr. GRPO).

  Returns:
    float64[P, G].

  Raises:
    ValueError: a valid reward is not finite.
  """
  rewards, valid = _checked(rewards, valid)
  out = np.zeros(rewards.shape)
  for row, (group, keep) in enumerate(zip(rewards, valid, strict=True)):
    out[row] = _standardise(group, keep, divide)
  return out


def _standardise(values: np.ndarray, keep: np.ndarray, divide: bool) -> np.ndarray:
  """z-scores of the kept values around their mean, 0 for the others and for flat values. Any shape."""
  out = np.zeros(values.shape)
  if flat(values, keep):
    return out
  kept = values[keep]
  scale = np.abs(kept).max()  # squares of 1e200 would overflow
  centred = kept / scale - np.mean(kept / scale)
  out[keep] = centred / np.sqrt(np.mean(centred**2)) if divide else centred * scale
  return out


def process_advantages(
  rewards: np.ndarray, is_source: np.ndarray, *, normalise: str = "zscore", clip: float = 5.0
) -> np.ndarray:
  """Token rewards of *one group* to process advantages; all sources of all its rollouts are one pool.

  Args:
    rewards: float[...], the attribution of each token, in whatever layout.
    is_source: bool like `rewards`; the other tokens stay out of the pool and get 0.
    normalise: "zscore": (r − mean) / std. "scale": r / root mean square, which keeps signs and zeros. "none": r.
    clip: bound on the magnitude of "zscore" and "scale". With 16 non-zero attributions among 1000 sources those have
      z-scores around 8.

  Returns:
    float64 like `rewards`. A pool without spread ("zscore"), or of zeros ("scale"), gives 0.

  Raises:
    ValueError: unknown `normalise`, or a source's reward is not finite.
  """
  rewards, is_source = _checked(rewards, is_source)
  if normalise == "none":
    return np.where(is_source, rewards, 0.0)
  if normalise == "zscore":
    advantages = _standardise(rewards, is_source, divide=True)
  elif normalise == "scale":
    advantages = _rescale(rewards, is_source)
  else:
    raise ValueError(f"normalise: {normalise!r} is unknown; choose one of {', '.join(PROCESS_NORMALISATIONS)}")
  return np.clip(advantages, -clip, clip)


def _rescale(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
  out = np.zeros(values.shape)
  scale = np.abs(values[keep]).max(initial=0.0)
  if scale > _FLAT:
    out[keep] = values[keep] / scale / np.sqrt(np.mean((values[keep] / scale) ** 2))
  return out


def combine(outcome: np.ndarray, process: np.ndarray, is_source: np.ndarray, weight: float) -> np.ndarray:
  """Â = Â_out + λ Â_proc, float32.

  Args:
    outcome: float[...], one number a rollout.
    process: float[..., C].
    is_source: bool[..., C]; the other tokens get the outcome advantage alone.
    weight: λ; 0 is outcome-only learning.
  """
  outcome = np.asarray(outcome, np.float64)[..., None]
  return (outcome + weight * np.where(is_source, process, 0.0)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RewardStatistics:
  """Of the valid rewards of a batch. Spread within groups is what is learnt from; spread across the batch is not.

  Attributes:
    mean: over all of them.
    std_within_group: mean over groups of the group's standard deviation.
    std_across_batch: standard deviation of the groups' means.
    flat_fraction: fraction of the groups that have no spread and so teach nothing.
    invalid: how many rollouts have no reward.
  """

  mean: float
  std_within_group: float
  std_across_batch: float
  flat_fraction: float
  invalid: int


def reward_statistics(rewards: np.ndarray, valid: np.ndarray | None = None) -> RewardStatistics:
  """Statistics of rewards float[P, G]; NaN means where nothing is valid."""
  rewards, valid = _checked(rewards, valid)
  groups = [row[keep] for row, keep in zip(rewards, valid, strict=True) if keep.any()]
  nan = float("nan")
  return RewardStatistics(
    mean=float(np.mean(rewards[valid])) if groups else nan,
    std_within_group=float(np.mean([np.std(group) for group in groups])) if groups else nan,
    std_across_batch=float(np.std([np.mean(group) for group in groups])) if groups else nan,
    flat_fraction=float(np.mean([flat(row, keep) for row, keep in zip(rewards, valid, strict=True)]))
    if len(rewards)
    else nan,
    invalid=int(np.sum(~valid)),
  )


def _checked(rewards: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
  rewards = np.asarray(rewards, np.float64)
  valid = np.ones(rewards.shape, bool) if valid is None else np.asarray(valid, bool)
  assert rewards.shape == valid.shape, f"rewards {rewards.shape} and mask {valid.shape} differ in shape"
  if not np.isfinite(rewards[valid]).all():
    where = np.argwhere(valid & ~np.isfinite(rewards))[0].tolist()
    raise ValueError(
      f"the reward at {where} is not finite; mark rollouts whose reward could not be computed as invalid"
    )
  return rewards, valid
