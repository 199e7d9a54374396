"""Serves models to any client of OpenAI's API: loads them, listens, and stops when it is asked to."""

import asyncio
import importlib.util
import os

from ml_collections import ConfigDict

from attrimem_jax.io import models
from attrimem_jax.jobs.run import Run
from attrimem_jax.serving.engine import Engine, Served

KEY = "ATTRIMEM_API_KEY"
_LOCAL = ("127.0.0.1", "::1", "localhost")


def run_serve(config: ConfigDict, run: Run) -> None:
  """Job `serve`: until SIGTERM or SIGINT. Nothing is written.

  Raises:
    ValueError: aiohttp is not installed, a model cannot be loaded, other machines could connect without a key.
    OSError: the port is taken.
  """
  if importlib.util.find_spec("aiohttp") is None:
    raise ValueError("job 'serve' needs the aiohttp package: pip install 'attrimem-jax[serve]'")
  from attrimem_jax.serving import http

  settings, key = config.serve, os.environ.get(KEY, "")
  if settings.host not in _LOCAL and not key:
    raise ValueError(
      f"config.serve.host={settings.host!r} lets other machines connect: set ${KEY} to a key that clients must send, "
      "or use 127.0.0.1"
    )
  for spec in settings.models:
    models.check(spec)
  served = {spec: Served.of(spec, models.load(spec), config.policy.thinking) for spec in settings.models}
  engine = Engine(served, queue=settings.queue, batch=settings.batch, dtype=settings.dtype)
  limits = http.Limits(settings.max_new_tokens, settings.body, settings.timeout, settings.grace)
  endpoint = http.Endpoint(engine, limits, key, config.seed)
  asyncio.run(http.serve(endpoint, engine, limits, settings.host, settings.port))
  print("stopped", flush=True)
