"""A peer in an environment of its own, asked over a pipe, so that it and this project take turns on one machine."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Peer:
  """A process that answers one JSON line with one JSON line: a script's own `--worker` under another Python."""

  def __init__(self, python: str, script: str, *arguments: str):
    command = [python, script, *arguments]
    self._name = " ".join(arguments)
    self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    self._read()

  def _read(self) -> Any:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f"the peer {self._name} ended with status {self._process.wait()}: its error is above")
    return json.loads(line)

  def ask(self, **request: Any) -> Any:
    print(json.dumps(request), file=self._process.stdin, flush=True)
    return self._read()

  def close(self) -> None:
    assert self._process.stdin is not None
    self._process.stdin.close()
    self._process.wait()


def serve(answer: Callable[..., Any]) -> None:
  """The other end: answers until the pipe is closed. What the peer itself prints goes nowhere."""
  answers = sys.stdout
  print(json.dumps("ready"), file=answers, flush=True)
  for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()):
      found = answer(**json.loads(line))
    print(json.dumps(found), file=answers, flush=True)
