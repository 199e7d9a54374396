"""A run directory: configuration, metrics, checkpoints, rollouts, and what happens when a run stops or goes on."""

import json
import pathlib
import signal
from typing import Any

from ml_collections import ConfigDict

from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.io.metrics import MetricsWriter, Progress, write_rollouts
from attrimem_jax.rl.optimizer import TrainState

# Keys that a run may be resumed with other values of: they decide how long and how often, not what is computed.
_FREE = ("train.steps", "train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "job")


class Run:
  """Opens `workdir` for a job; as a context manager it closes files and puts signal handlers back.

  SIGTERM and SIGINT set `stopping`: loops then save and return at the end of the step.

  Raises:
    ValueError: the directory holds a run of another configuration.
  """

  def __init__(self, config: ConfigDict, workdir: str):
    self.config, self.workdir = config, pathlib.Path(workdir)
    self.stopping = False
    self.workdir.mkdir(parents=True, exist_ok=True)
    if config.job in ("train", "sft"):
      _check_same(self.workdir / "config.json", config)
    self.checkpoints = Checkpoints(self.workdir / "checkpoints", keep=config.train.keep_checkpoints)
    self.resumed = self.checkpoints.latest()
    self.metrics = MetricsWriter(self.workdir, resume_step=self.resumed)
    self._handlers: dict[int, Any] = {}

  def __enter__(self) -> "Run":
    for number in (signal.SIGTERM, signal.SIGINT):
      self._handlers[number] = signal.signal(number, self._stop)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    self.metrics.close()

  def _stop(self, number: int, frame: object) -> None:
    if self.stopping:  # asked twice: do not wait for the step
      raise KeyboardInterrupt
    self.stopping = True
    print(
      f"\nstopping after this step ({signal.Signals(number).name}); the same command goes on from there", flush=True
    )

  def restore(self, state: TrainState) -> TrainState:
    """The newest checkpoint, or `state` where there is none."""
    if self.resumed is None:
      return state
    print(f"going on from step {self.resumed} of {self.workdir}", flush=True)
    return self.checkpoints.restore(self.resumed, state)

  def due(self, step: int, every: int, last: bool) -> bool:
    """Whether a checkpoint is to be saved after `step` steps."""
    return last or self.stopping or step % every == 0

  def save(self, step: int, state: TrainState, meta: dict | None = None) -> None:
    """Writes a checkpoint; it is complete when this returns."""
    self.checkpoints.save(step, state, {"config": self.config.to_dict(), **(meta or {})})

  def rollouts(self, step: int, rows: list[dict]) -> None:
    write_rollouts(self.workdir, step, rows)

  def progress(self, start: int, total: int) -> Progress:
    return Progress(start, total)


def _check_same(file: pathlib.Path, config: ConfigDict) -> None:
  """Writes the configuration, or compares it with that of the run that is there already."""
  mine = json.loads(json.dumps(config.to_dict()))
  if file.exists():
    theirs = _flat(json.loads(file.read_text()))
    changed = [
      f"{name}: {theirs.get(name)!r} there, {value!r} now"
      for name, value in _flat(mine).items()
      if theirs.get(name) != value and name not in _FREE
    ]
    if changed:
      raise ValueError(
        f"{file.parent} holds a run of another configuration ({'; '.join(changed)}): "
        "give another --workdir, or remove it"
      )
  file.write_text(json.dumps(mine, indent=1) + "\n")


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
  return flat
