"""A run directory: configuration, metrics, checkpoints, rollouts, and what happens when a run stops or goes on."""

import fcntl
import json
import pathlib
import signal
from typing import IO, Any

from ml_collections import ConfigDict

from attrimem_jax import config as schema
from attrimem_jax.io.checkpoints import Checkpoints
from attrimem_jax.io.metrics import MetricsWriter, Progress, write_rollouts
from attrimem_jax.rl.optimizer import TrainState

# Keys that a run may be resumed with other values of: they decide how long and how often, not what is computed.
_FREE = ("train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "job")


class Run:
  """Opens `workdir` for a job; as a context manager it closes files and puts signal handlers back.

  SIGTERM and SIGINT set `stopping`: loops then save and return at the end of the step.

  Raises:
    ValueError: the directory holds a run of another configuration, or one that is going on.
  """

  def __init__(self, config: ConfigDict, workdir: str):
    self.config, self.workdir = config, pathlib.Path(workdir)
    self.stopping = False
    self.workdir.mkdir(parents=True, exist_ok=True)
    self._lock: IO[str] | None = None
    if config.job in ("train", "sft"):
      self._lock = _lock(self.workdir)
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
    if self._lock is not None:
      self._lock.close()

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

  def evaluation(self, step: int, rows: list[dict]) -> None:
    """Keeps what was asked and answered in an evaluation: evaluations/step_*.jsonl."""
    write_rollouts(self.workdir, step, rows, "evaluations")

  def first_evaluation(self) -> list[dict] | None:
    """The rows of the evaluation before the first step, or None."""
    path = self.workdir / "evaluations" / f"step_{0:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else None

  def progress(self, start: int, total: int) -> Progress:
    return Progress(start, total)


def _lock(workdir: pathlib.Path) -> IO[str]:
  """Two processes that wrote the same run would spoil it. The lock goes with the process, however it ends."""
  lock = open(workdir / ".lock", "w")  # noqa: SIM115 (held until the run ends)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.close()
    raise ValueError(f"another process is running in {workdir}: wait for it, or give another --workdir") from None
  return lock


def _check_same(file: pathlib.Path, config: ConfigDict) -> None:
  """Writes the configuration, or compares it with that of the run that is there already."""
  mine = json.loads(json.dumps(config.to_dict()))
  free = _FREE if config.optim.schedule == "cosine" else (*_FREE, "train.steps")  # the cosine ends at the last step
  if file.exists():
    theirs = schema.flat(json.loads(file.read_text()))
    changed = [
      f"{name}: {theirs.get(name)!r} there, {value!r} now"
      for name, value in schema.flat(mine).items()
      if theirs.get(name) != value and name not in free
    ]
    if changed:
      raise ValueError(
        f"{file.parent} holds a run of another configuration ({'; '.join(changed)}): "
        "give another --workdir, or remove it"
      )
  file.write_text(json.dumps(mine, indent=1) + "\n")
