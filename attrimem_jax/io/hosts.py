"""Many processes that train together: each drives its own devices, and all run the same program.

Every process draws the same tasks and reads the same files, so they agree on what comes next without a word; what the
devices hold is split over all of them (`nn.sharding`). Only the first process writes and speaks. The run directory
therefore lies on a file system that all of them see.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

AUTO = "auto"


@contextlib.contextmanager
def joined(hosts: ConfigDict) -> Iterator[None]:
  """Joins the other processes of `config.hosts`, before any device is touched, and leaves them at the end.

  A process that is lost ends the others after about `hosts.timeout` seconds. So does one that fails: it does
  not wait for the others, which wait for it.

  Raises:
    ValueError: the surroundings do not say who the others are. Where these do not come, JAX aborts the process.
  """
  if not hosts.coordinator:
    yield
    return
  told = hosts.coordinator != AUTO
  who = f"process {hosts.process} of {hosts.processes}" if told else "this process"
  # Said beforehand: where nobody comes, JAX aborts the process from within and no error could be caught.
  print(f"{who} meets the others at {hosts.coordinator}, within {hosts.timeout} s", file=sys.stderr, flush=True)
  try:
    jax.distributed.initialize(
      hosts.coordinator if told else None,
      hosts.processes or None,
      hosts.process if hosts.process >= 0 else None,
      cluster_detection_method="deactivate" if told else None,
      initialization_timeout=hosts.timeout,
      heartbeat_timeout_seconds=hosts.timeout,
      shutdown_timeout_seconds=hosts.timeout,
    )
  except (ValueError, RuntimeError) as error:
    first = str(error).strip().splitlines()[0]
    raise ValueError(
      f"config.hosts: {who} could not join the others at {hosts.coordinator!r} ({first}). Start all processes, with "
      "the same address and number of processes, within config.hosts.timeout seconds; auto works under Slurm, Open "
      "MPI, Kubernetes (pip install kubernetes) and on TPU pods"
    ) from error
  try:
    with contextlib.ExitStack() as stack:
      if not leads():
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
      yield
    meet("end")  # the first one may still be writing its report
  except BaseException as error:
    # An orderly exit would meet the others at a barrier that they never reach. They learn of it by a lost connection.
    message = error if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    print(f"error in process {jax.process_index()} of {jax.process_count()}: {message}", file=sys.stderr, flush=True)
    if not isinstance(error, ValueError | OSError | KeyboardInterrupt):
      sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(1)
  jax.distributed.shutdown()


def leads() -> bool:
  """Whether this process is the one that writes files and speaks."""
  return jax.process_index() == 0


def meet(name: str) -> None:
  """Waits until all processes are here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
  """Whether the flag is set in any process. All of them have to ask."""
  return bool(np.any(multihost_utils.process_allgather(np.array(flag)))) if jax.process_count() > 1 else flag
