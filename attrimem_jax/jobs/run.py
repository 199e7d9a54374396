"""A run directory: configuration, metrics, checkpoints, rollouts, and what happens when a run stops or goes on.

Jobs that train, study many runs or benchmark own their directory: one run at a time, one configuration. All other jobs
read what is there and write nothing but their own results, so they may look at a run that is going on. Of several
processes (`io.hosts`) the first one writes; checkpoints are written by all.
"""

import fcntl
import json
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from attrimem_jax import config as schema
from attrimem_jax.io import hosts
from attrimem_jax.io.checkpoints import Checkpoints, complete_steps
from attrimem_jax.io.metrics import MetricsWriter, Progress, read_rows, write_json, write_rollouts
from attrimem_jax.rl.optimizer import TrainState

TRAINING = ("train", "sft")
OWNING = (*TRAINING, "study", "benchmark")
# Keys that a run may be resumed with other values of: they decide how long and how often, not what is computed.
_FREE = (
  "train.log_every",
  "train.checkpoint_every",
  "train.keep_checkpoints",
  "job",
  "study.arms",
  "study.seeds",
  *(f"sft.teacher.{n}" for n in schema.CONNECTION),
  *(f"hosts.{name}" for name in ("coordinator", "processes", "process", "timeout")),
)
_JUDGE = "eval.judge."  # answers can be judged afterwards
_FREE_BENCHMARK = (
  "eval.bootstrap",
  "eval.confidence",
  "eval.episodes",  # more conversations do not change earlier ones
  *(f"answer.endpoint.{n}" for n in schema.CONNECTION),
)


class Run:
  """Opens `workdir` for a job; as a context manager it closes files and puts signal handlers back.

  Where the job can stop between two pieces of work, SIGTERM and SIGINT set `stopping`: its loop then saves and returns.

  Attributes:
    newest: step of the newest complete checkpoint, or None.

  Raises:
    ValueError: the directory cannot be made; or, for jobs that train, it holds a run of another configuration or one
      that is going on.
  """

  def __init__(self, config: ConfigDict, workdir: str | os.PathLike[str]):
    self.config, self.workdir = config, pathlib.Path(os.path.expanduser(workdir))
    self._asked_to_stop = self._agreed_to_stop = False
    self._handlers: dict[int, Any] = {}
    self._lock: IO[str] | None = None
    self._metrics: MetricsWriter | None = None
    self._pinned: dict[str, Any] = {}
    self._folder = self.workdir / "checkpoints"
    self.newest = max(complete_steps(self._folder), default=None)
    if config.job in OWNING:
      _make(self.workdir)
      self._lock = _lock(self.workdir) if hosts.leads() else None
      self._earlier = earlier_config(self.workdir / "config.json")
      _check_same(self.workdir, self._earlier, config)
      self._pinned = self._earlier.get("pinned", {})
    if config.job in TRAINING:
      self._checkpoints = Checkpoints(self._folder, keep=config.train.keep_checkpoints)

  def __enter__(self) -> "Run":
    if self.config.job in (*OWNING, "attribute"):
      for number in (signal.SIGTERM, signal.SIGINT):
        self._handlers[number] = signal.signal(number, self._stop)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)
    if self._metrics is not None:
      self._metrics.close()
    if self._lock is not None:
      self._lock.close()

  @property
  def stopping(self) -> bool:
    """Whether to stop. Several processes agree on it in `due`, or some would wait for a step that others never take."""
    return self._agreed_to_stop if jax.process_count() > 1 else self._asked_to_stop

  def _stop(self, number: int, frame: object) -> None:
    if self._asked_to_stop:  # asked twice: do not wait for the step
      raise KeyboardInterrupt
    self._asked_to_stop = True
    print(
      f"\nstopping after this step ({signal.Signals(number).name}); the same command goes on from there", flush=True
    )

  def pinned(self, name: str, choose: Callable[[], Any]) -> Any:
    """What `choose` returned (anything that JSON holds) when the run began: the same however often it goes on."""
    if name not in self._pinned:
      self._pinned[name] = choose()
    return self._pinned[name]

  def begin(self, state: TrainState) -> TrainState:
    """The newest checkpoint that can be read, or `state` where there is none; drops whatever was written after it.

    Call it once all that the run needs has been found: from here on the directory belongs to this configuration.

    Raises:
      ValueError: no checkpoint can be read, or they are gone while their metrics are still there.
    """
    restored = self._checkpoints.restore_newest(state)
    step = None if restored is None else int(restored.step)
    if step is None:
      self._refuse_lost_checkpoints()
    else:
      print(f"going on from step {step} of {self.workdir}", flush=True)
    if hosts.leads():
      self._metrics = MetricsWriter(self.workdir, resume_step=step)
      self.keep_config()
    hosts.meet("begin")  # from here on all see the same files
    self.first_evaluation()  # or a damaged one would be told at the end
    return state if restored is None else restored

  def keep_config(self) -> None:
    """Writes config.json: from here on the directory belongs to this configuration."""
    write_json(self.workdir / "config.json", {**_plain(self.config), "pinned": self._pinned})

  def _refuse_lost_checkpoints(self) -> None:
    every = self._earlier.get("train", {}).get("checkpoint_every", math.inf)
    last = max((row.get("step", 0) for row in self.rows()), default=0)
    if last > every:
      raise ValueError(
        f"{self.workdir} holds metrics up to step {last}, but no checkpoint: bring {self._folder} back, or remove the "
        "directory to start again"
      )

  def due(self, step: int, every: int, last: bool) -> bool:
    """Whether a checkpoint is to be saved after `step` steps; every process asks once a step."""
    self._agreed_to_stop = hosts.any_of(self._asked_to_stop)
    return last or self.stopping or step % every == 0

  def save(self, step: int, state: TrainState) -> None:
    """Writes a checkpoint; it is complete when this returns."""
    self._checkpoints.save(step, state, {"config": self.config.to_dict()})
    self.newest = step

  def log(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes a row of metrics.

    Raises:
      ValueError: loss or gradient are not finite, so that parameters saved after this step would be worth nothing.
    """
    broken = [f"{name} is {metrics[name]}" for name in _VITAL if not math.isfinite(metrics.get(name, 0.0))]
    if broken:
      kept = f"the newest checkpoint is of step {self.newest}" if self.newest else "there is no checkpoint yet"
      raise ValueError(
        f"step {step}: {' and '.join(broken)}, so an update before it went too far. Nothing of this step is kept; "
        f"{kept}. Lower config.optim.lr (now {self.config.optim.lr}) and begin again in another --workdir"
      )
    if hosts.leads():
      assert self._metrics is not None, "begin() comes first"
      self._metrics.write(step, metrics)

  def rollouts(self, step: int, rows: list[dict]) -> None:
    if hosts.leads():
      write_rollouts(self.workdir, step, rows)

  def evaluation(self, step: int, rows: list[dict]) -> None:
    """Keeps what was asked and answered in an evaluation: evaluations/step_*.jsonl."""
    if hosts.leads():
      write_rollouts(self.workdir, step, rows, "evaluations")

  def memories(self, step: int, rows: list[dict]) -> None:
    """Keeps the memories of an evaluation: memories/step_*.jsonl."""
    if hosts.leads():
      write_rollouts(self.workdir, step, rows, "memories")

  def first_evaluation(self) -> list[dict] | None:
    """The rows of the evaluation before the first step, or None. Raises ValueError where the file is damaged."""
    path = self.workdir / "evaluations" / f"step_{0:06d}.jsonl"
    if not path.is_file():
      return None
    try:
      return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
      raise ValueError(f"{path} is damaged ({error}): bring it back, or remove it to go on without it") from None

  def evaluated(self, step: int) -> bool:
    """Whether the metrics hold an evaluation of this step."""
    return any(row.get("step") == step and "eval/accuracy" in row for row in self.rows())

  def rows(self) -> list[dict[str, Any]]:
    """The metrics so far."""
    return read_rows(self.workdir / "metrics.jsonl")

  def progress(self, start: int, total: int, unit: str = "step") -> Progress:
    return Progress(start, total, unit, None if hosts.leads() else sys.stdout)  # theirs is silent


_VITAL = ("train/loss", "train/grad_norm")


def _make(workdir: pathlib.Path) -> None:
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(f"the run directory {workdir} cannot be made ({error.strerror}): give another --workdir") from None


def _lock(workdir: pathlib.Path) -> IO[str]:
  """Two processes that wrote the same run would spoil it. The lock goes with the process, however it ends."""
  lock = open(workdir / ".lock", "w", encoding="utf-8")  # noqa: SIM115 (held until the run ends)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    lock.close()
    raise ValueError(f"another process is running in {workdir}: wait for it, or give another --workdir") from None
  return lock


def _plain(config: ConfigDict) -> dict[str, Any]:
  return json.loads(json.dumps(config.to_dict()))


def earlier_config(file: pathlib.Path) -> dict[str, Any]:
  """The configuration that the directory belongs to already; empty if it is new."""
  if not file.exists():
    return {}
  try:
    found = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(found, dict):
      return found
    what = f"it is a {type(found).__name__}"
  except ValueError as error:
    what = str(error)
  raise ValueError(f"{file} is no configuration ({what}): bring it back, or give another --workdir")


def _check_same(workdir: pathlib.Path, earlier: dict[str, Any], config: ConfigDict) -> None:
  free = _FREE if config.optim.schedule == "cosine" else (*_FREE, "train.steps")  # the cosine ends at the last step
  free = (*free, *_FREE_BENCHMARK) if config.job == "benchmark" else free
  theirs = schema.flat(earlier)
  changed = [
    f"{name}: {theirs.get(name)!r} there, {value!r} now"
    for name, value in schema.flat(_plain(config)).items()
    if earlier and theirs.get(name) != value and name not in free and not name.startswith(_JUDGE)
  ]
  if changed:
    raise ValueError(
      f"{workdir} holds a run of another configuration ({'; '.join(changed)}): give another --workdir, or remove it"
    )
