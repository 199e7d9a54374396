"""The optimiser and the state that it moves.

Weights and moments are float32 always: Adam at a learning rate of 1e-6 on bfloat16 weights changes nothing at all,
since a step is smaller than half the distance between two neighbouring bfloat16 numbers. Compute may be narrower;
that is the decoder's business.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from optax.contrib import MuonDimensionNumbers, muon

Params = Any

NAMES = ("adamw", "muon")
SCHEDULES = ("constant", "cosine")
_MUON_RMS = 0.2  # root mean square of an update at rate 1, that of Adam (arXiv 2502.16982)


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """An optimiser behind a clip of the global gradient norm.

  Attributes:
    name: "adamw", or "muon": the matrices of the layers move by orthogonalised momentum, scaled to the size of Adam's
      updates, and all else by Adam, both with Nesterov momentum. Training the shipped models from scratch takes half
      the steps.
    learning_rate: the peak.
    schedule: "constant", or "cosine" (down to `final_fraction` of the peak at `total_steps`).
    warmup_steps: updates of linear warm-up. The first update already has 1/(warmup_steps + 1) of the peak, never 0.
    total_steps: updates of the whole run; only the cosine reads it.
    final_fraction: what the cosine ends at, as a fraction of the peak.
    b1, b2, eps: Adam's constants.
    weight_decay: decoupled; norms and biases are spared.
    clip_norm: the largest global gradient norm; 0 switches clipping off.
  """

  learning_rate: float
  name: str = "adamw"
  schedule: str = "constant"
  warmup_steps: int = 0
  total_steps: int = 0
  final_fraction: float = 0.1
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float = 1.0

  def problems(self) -> list[str]:
    """Everything wrong with these settings, each as "name: what, and how to mend it"."""
    found = []
    if self.name not in NAMES:
      found.append(f"name: {self.name!r} is unknown; choose one of {', '.join(NAMES)}")
    if self.schedule not in SCHEDULES:
      found.append(f"schedule: {self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if self.schedule == "cosine" and self.total_steps <= self.warmup_steps:
      found.append(f"total_steps: {self.total_steps} must exceed warmup_steps ({self.warmup_steps}) for a cosine")
    for name in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm", "final_fraction"):
      if getattr(self, name) < 0:
        found.append(f"{name}: {getattr(self, name)} is negative; give 0 or more")
    return found


@struct.dataclass
class TrainState:
  """What a run of updates carries: float32 weights, the optimiser's state, and the number of updates done (int32)."""

  params: Params
  opt_state: Any
  step: jax.Array


def make_schedule(settings: OptimizerSettings) -> optax.Schedule:
  """Learning rate as a function of the number of updates done."""
  peak, warmup = settings.learning_rate, settings.warmup_steps
  if settings.schedule == "cosine":
    main = optax.cosine_decay_schedule(peak, settings.total_steps - warmup, settings.final_fraction)
  else:
    main = optax.constant_schedule(peak)
  if not warmup:
    return main
  rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  return optax.join_schedules([rising, main], [warmup])


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
  """Clip, AdamW or Muon, decoupled decay, schedule.

  Raises:
    ValueError: the settings contradict themselves; all problems at once.
  """
  if found := settings.problems():
    raise ValueError("optimizer settings: " + "; ".join(found))
  clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
  schedule = make_schedule(settings)
  if settings.name == "muon":
    main = muon(
      schedule,
      weight_decay=settings.weight_decay,
      weight_decay_mask=_decayed,
      mu_dtype=jnp.float32,
      adam_b1=settings.b1,
      adam_b2=settings.b2,
      muon_weight_dimension_numbers=_matrices,
      consistent_rms=_MUON_RMS,
    )
  else:
    main = optax.adamw(
      schedule,
      b1=settings.b1,
      b2=settings.b2,
      eps=settings.eps,
      weight_decay=settings.weight_decay,
      mask=_decayed,
      mu_dtype=jnp.float32,
    )
  return optax.chain(clip, main)


def _matrices(params: Params) -> Any:
  """For every stacked weight of the layers, which axes its matrices read and write; None for what is no matrix."""
  read_write: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"o": ((1, 2), (3,))}
  read_write.update(dict.fromkeys(("gate", "up", "down"), ((1,), (2,))))
  read_write.update(dict.fromkeys("qkv", ((1,), (2, 3))))

  def axes(path: tuple, _: jax.Array) -> MuonDimensionNumbers | None:
    found = read_write.get(jax.tree_util.keystr(path[-1:], simple=True))
    return MuonDimensionNumbers(*found) if found else None

  return jax.tree_util.tree_map_with_path(axes, params)


def _decayed(params: Params) -> Params:
  # By name: layers are stacked, so a norm's scale has two axes and cannot be told from a matrix by its rank.
  def decayed(path: tuple, _: jax.Array) -> bool:
    return not jax.tree_util.keystr(path, simple=True, separator="/").endswith(("norm", "bias"))

  return jax.tree_util.tree_map_with_path(decayed, params)


def init_state(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
  """A state at step 0.

  Raises:
    ValueError: a weight or a moment is a float narrower or wider than float32, named by its path.
  """
  _check_float32(params, "parameter")
  opt_state = optimizer.init(params)
  _check_float32(opt_state, "moment")
  return _beside(params, TrainState(params=params, opt_state=opt_state, step=jnp.zeros((), jnp.int32)))


def _beside(params: Params, state: TrainState) -> TrainState:
  """Puts counters where the weights are. An update returns them there: elsewhere, the second update compiles again."""
  weight = jax.tree.leaves(params)[0]
  if isinstance(weight, jax.core.Tracer) or not getattr(weight, "committed", False):  # under jit there is no place yet
    return state
  home = weight.sharding
  if isinstance(home, jax.sharding.NamedSharding):
    home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())
  return jax.tree.map(lambda leaf: leaf if leaf.committed else jax.device_put(leaf, home), state)


class StepFunction:
  """A compiled `step(state, *rest) -> (state, metrics)` that donates the state and returns it split as it came.

  Left to itself, the compiler may split an array that came whole. The state of the next call then differs from that
  of this one, and everything that takes it is compiled again.
  """

  def __init__(self, step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]):
    self._step = step
    self._jitted: dict[Any, Any] = {}

  def __call__(self, state: TrainState, *rest: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    return self._for(state)(state, *rest)

  def lower(self, state: TrainState, *rest: Any) -> jax.stages.Lowered:
    """As `jax.jit(...).lower`."""
    return self._for(state).lower(state, *rest)

  @property
  def compilations(self) -> int:
    """How many programs have been compiled so far."""
    return sum(jitted._cache_size() for jitted in self._jitted.values())

  def _for(self, state: TrainState) -> Any:
    leaves, tree = jax.tree.flatten(state)
    key = tree, tuple(leaf.sharding if getattr(leaf, "committed", False) else None for leaf in leaves)
    if key not in self._jitted:
      kept = jax.tree.unflatten(tree, key[1])
      self._jitted[key] = jax.jit(self._step, donate_argnums=0, out_shardings=(kept, None))
    return self._jitted[key]


def _check_float32(tree: Any, what: str) -> None:
  wrong = [
    f"{jax.tree_util.keystr(path)} is {leaf.dtype}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float32
  ]
  if wrong:
    shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    raise ValueError(f"training needs float32 {what}s, got {shown}. Convert them with .astype(jnp.float32) first.")


def apply_gradients(
  optimizer: optax.GradientTransformation, state: TrainState, gradients: Params, tokens: jax.Array
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One optimiser step; skipped, and counted, where no token had a loss or the gradient is not finite.

  A skipped step keeps weights and moments as they were (Adam would otherwise move on its momentum alone).
  `update_norm` is the norm of what the stored weights really changed by, so rounding that swallows an update shows as
  0.

  Args:
    optimizer: made by `make_optimizer`.
    state: the state to move.
    gradients: a tree like `state.params`.
    tokens: how many tokens carried a loss.

  Returns:
    The new state and the metrics `grad_norm`, `update_norm`, `skipped` (0 or 1).
  """
  grad_norm = optax.tree.norm(gradients)
  usable = (tokens > 0) & jnp.isfinite(grad_norm)
  updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
  params = _choose(usable, optax.apply_updates(state.params, updates), state.params)
  opt_state = _choose(usable, opt_state, state.opt_state)
  moved = optax.tree.norm(jax.tree.map(jnp.subtract, params, state.params))
  metrics = {"grad_norm": grad_norm, "update_norm": moved, "skipped": 1.0 - usable.astype(jnp.float32)}
  return TrainState(params=params, opt_state=opt_state, step=state.step + 1), metrics


def _choose(condition: jax.Array, yes: Any, no: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
