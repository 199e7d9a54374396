"""Checkpoints of training: parameters, optimiser state and a small dictionary, each an item of its own.

A step counts once all its items have been committed, so a run killed while it saves goes on from the step before. A
restore compares the saved tree with the wanted one leaf by leaf, because a leaf that quietly keeps its initial value
(Adam's moments, say) is a fault that no error would ever show. Shardings come from the wanted tree, never from disk.
"""

import itertools
import logging
import os
import pathlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from attrimem_jax.io import hosts

if TYPE_CHECKING:
  from attrimem_jax.rl.optimizer import Params, TrainState

T = TypeVar("T")
ITEMS = ("params", "opt", "meta")


class UnreadableError(ValueError):
  """A checkpoint whose files are cut or damaged."""


class Checkpoints:
  """The checkpoints below one folder.

  Args:
    folder: made where missing. Its sub-folders named by a number belong to this class, which deletes old ones.
    keep: how many of the newest steps stay. None is for reading: nothing is made, saved or deleted.

  Raises:
    ValueError: `keep` is less than 1; or it is None and there is no checkpoint to read.
  """

  def __init__(self, folder: str | os.PathLike[str], keep: int | None):
    if keep is not None and keep < 1:
      raise ValueError(f"checkpoints: keep is {keep}; keep 1 or more, or a run could not go on after a crash")
    self.folder = pathlib.Path(folder).resolve()
    if keep is None and not self.steps():
      what = "holds no complete checkpoint" if self.folder.is_dir() else "does not exist"
      raise ValueError(
        f"checkpoint folder {self.folder} {what}; train first, or give the checkpoint folder of another run"
      )
    self._manager = _manager(self.folder, keep)

  def save(self, step: int, state: "TrainState", meta: Mapping[str, Any]) -> None:
    """Saves, and returns when the step is committed: buffers may be donated right after, and any error is raised here.

    Args:
      step: number of updates done.
      state: what to save.
      meta: a dictionary that JSON can hold.

    Raises:
      ValueError: the step is there already.
    """
    if self._step_folder(step).exists():
      raise ValueError(f"{self.folder}: step {step} is there already; skip this save, or remove its folder first")
    items = ocp.args.Composite(
      params=ocp.args.StandardSave(_nested(state.params)),
      opt=ocp.args.StandardSave(_optimizer_item(state)),
      meta=ocp.args.JsonSave(dict(meta)),
    )
    self._manager.save(step, args=items, force=True)
    self._manager.wait_until_finished()

  def latest(self) -> int | None:
    """The newest complete step, or None."""
    return max(self.steps(), default=None)

  def steps(self) -> list[int]:
    """All complete steps, ascending."""
    return complete_steps(self.folder)

  def restore_newest(self, state: "TrainState") -> "TrainState | None":
    """The newest state that can be read; None where nothing was ever saved.

    Newer folders that are damaged, or lack an item, are named on standard output and renamed to <step>.broken, so that
    the run can go on from an older one and save those steps again.

    Raises:
      ValueError: checkpoints are there, but none can be read; or as `restore`.
    """
    newest_first = sorted(ocp.utils.checkpoint_steps(self.folder), reverse=True)
    broken = []
    for step in newest_first:
      try:
        state = self.restore(step, state)
      except UnreadableError as error:
        broken.append((step, error))
        continue
      for newer, reason in broken:
        if hosts.leads():
          aside = _set_aside(self._step_folder(newer))
          print(f"{reason}; it is now {aside}, and the run goes on from step {step}", flush=True)
      hosts.meet("broken checkpoints are set aside")
      self._manager.reload()
      return state
    if broken:
      raise ValueError(
        f"{broken[0][1]}, and there is no older one to go on from; bring the folder back, or remove {self.folder} to "
        "start again"
      )
    return None

  def restore(self, step: int, state: "TrainState") -> "TrainState":
    """The state saved at a step, on the devices and with the shardings of the given one.

    Args:
      step: one of `steps()`.
      state: a live state or one of `jax.ShapeDtypeStruct`s. A leaf without a sharding goes to the default device.

    Raises:
      ValueError: a leaf is missing, unexpected, or of another shape or type, named by its path.
      UnreadableError: no such step, or its files are damaged.
    """
    params = self._read(step, "params", _nested(state.params))
    opt = self._read(step, "opt", _optimizer_item(state))
    return type(state)(
      params=_like(state.params, params), opt_state=_like(state.opt_state, opt.get("state", {})), step=opt["step"]
    )

  def params(self, step: int) -> "Params":
    """The parameters saved at a step, as they were saved, on the default device.

    Raises:
      ValueError: no such step.
    """
    self._check(step)
    return self._read(step, "params", self._saved(step, "params"))

  def meta(self, step: int) -> dict[str, Any]:
    """The dictionary saved at a step.

    Raises:
      ValueError: no such step.
    """
    self._check(step)
    return dict(self._restored(step, "meta", ocp.args.JsonRestore()))

  def close(self) -> None:
    """Waits for what is still being written."""
    self._manager.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()

  def _step_folder(self, step: int) -> pathlib.Path:
    return self.folder / str(step)

  def _check(self, step: int) -> None:
    if step not in (steps := self.steps()):
      there = ", ".join(map(str, steps)) or "none"
      raise UnreadableError(f"{self.folder}: no complete checkpoint of step {step}; there: {there}")

  def _saved(self, step: int, item: str) -> Any:
    metadata = self._guarded(step, item, lambda: self._manager.item_metadata(step)[item])
    if metadata is None:
      raise UnreadableError(f"{self._step_folder(step) / item} cannot be read (it has no metadata)")
    # Some releases of orbax wrap the tree of an item. The shardings it was saved with are of no concern (see above).
    tree = getattr(metadata, "tree", metadata)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

  def _read(self, step: int, item: str, wanted: Any) -> Any:
    self._check(step)
    _compare(f"{self._step_folder(step)}: {item}", self._saved(step, item), wanted)
    return self._restored(step, item, ocp.args.StandardRestore(jax.tree.map(_abstract, wanted)))

  def _restored(self, step: int, item: str, how: Any) -> Any:
    return self._guarded(step, item, lambda: self._manager.restore(step, args=ocp.args.Composite(**{item: how}))[item])

  def _guarded(self, step: int, item: str, read: Callable[[], T]) -> T:
    """What `read` returns. The libraries below raise errors of every kind over damaged files."""
    try:
      return read()
    except Exception as error:
      first = next(iter(str(error).strip().splitlines()), type(error).__name__)
      raise UnreadableError(f"{self._step_folder(step) / item} cannot be read ({first[:200]})") from error


def complete_steps(folder: str | os.PathLike[str]) -> list[int]:
  """The steps below a checkpoint folder, ascending. One that lacks an item (a copy cut short) is not complete."""
  folder = pathlib.Path(folder)
  found = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
  return sorted(step for step in found if all((folder / str(step) / item).is_dir() for item in ITEMS))


def read_params(folder: str | os.PathLike[str], abstract: "Params", step: int | None = None) -> "Params":
  """The parameters of a training run, for jobs that do not train.

  Args:
    folder: the folder given to `Checkpoints`.
    abstract: the wanted tree, live or of `jax.ShapeDtypeStruct`s.
    step: which step; the newest by default.

  Raises:
    ValueError: there is no checkpoint, or it holds other parameters than wanted, named by path.
  """
  with Checkpoints(folder, keep=None) as checkpoints:
    newest = checkpoints.steps()[-1] if step is None else step
    return _like(abstract, checkpoints._read(newest, "params", _nested(abstract)))


def _manager(folder: pathlib.Path, keep: int | None) -> ocp.CheckpointManager:
  logger = logging.getLogger("absl")  # orbax writes to it too
  if not any(isinstance(present, _Quiet) for present in logger.filters):
    logger.addFilter(_Quiet())
  handlers = {"params": ocp.StandardCheckpointHandler(), "opt": ocp.StandardCheckpointHandler()}
  options = ocp.CheckpointManagerOptions(
    max_to_keep=keep,
    create=keep is not None,
    read_only=keep is None,
    save_interval_steps=0 if keep is None else 1,  # orbax warns if a reader leaves it at 1
    enable_async_checkpointing=False,
  )
  return ocp.CheckpointManager(folder, options=options, item_handlers={**handlers, "meta": ocp.JsonCheckpointHandler()})


class _Quiet(logging.Filter):
  """Holds back what orbax tells of its own inner life, a dozen lines a save; its warnings pass, as do other senders."""

  def filter(self, record: logging.LogRecord) -> bool:
    announces_a_reader = "is read only" in record.getMessage()  # which is what was asked for
    return "orbax" not in record.pathname or (record.levelno >= logging.WARNING and not announces_a_reader)


def _set_aside(folder: pathlib.Path) -> pathlib.Path:
  """Renames a folder so that it is no step any more; returns its new path."""
  number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.broken{n}").exists())
  return folder.rename(folder.with_name(f"{folder.name}.broken{number}"))


def _optimizer_item(state: "TrainState") -> dict[str, Any]:
  nested = _nested(state.opt_state)
  return {"step": state.step, **({"state": nested} if nested else {})}


def _keys(path: tuple[Any, ...]) -> list[str]:
  return [jax.tree_util.keystr((key,), simple=True) for key in path]


def _nested(tree: Any) -> dict[str, Any]:
  """Any tree as nested dictionaries: named tuples and empty states have no form of their own on disk."""
  nested: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    *parents, last = _keys(path)
    node = nested
    for key in parents:
      node = node.setdefault(key, {})
    node[last] = leaf
  return nested


def _like(tree: Any, nested: Any) -> Any:
  """The inverse of `_nested`: a tree of the structure of `tree` with the leaves of `nested`."""

  def leaf(path: tuple[Any, ...], _: Any) -> Any:
    node = nested
    for key in _keys(path):
      node = node[key]
    return node

  return jax.tree_util.tree_map_with_path(leaf, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _compare(where: str, saved: Any, wanted: Any) -> None:
  def table(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(_keys(path)): f"{np.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in leaves}

  have, want = table(saved), table(wanted)
  wrong = [f"{path} is missing" for path in want if path not in have]
  wrong += [f"{path} is unexpected" for path in have if path not in want]
  wrong += [f"{path} is {have[path]}, wanted {want[path]}" for path in want if have.get(path, want[path]) != want[path]]
  if wrong:
    shown = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    raise ValueError(
      f"{where}: {shown}. Use the model and optimizer settings of the run that saved it, or a new workdir"
    )
