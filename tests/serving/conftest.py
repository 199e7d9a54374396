"""A server of the embedded models in a thread of this process, so that it shares what the tests have compiled."""

import asyncio
import contextlib
import threading

import openai
import pytest
from aiohttp import web

from attrimem_jax.io import models
from attrimem_jax.serving.engine import Engine, Served
from attrimem_jax.serving.http import Endpoint, Limits


class Running:
  """Where a server listens, and its parts."""

  def __init__(self, url, engine, endpoint):
    self.url, self.engine, self.endpoint = url, engine, endpoint

  def client(self, **options):
    return openai.OpenAI(base_url=self.url, api_key=options.pop("api_key", "any"), max_retries=0, timeout=60, **options)


@contextlib.contextmanager
def running(served, limits=None, key="", **options):
  """Serves until the block ends."""
  engine = Engine(served, **options)
  endpoint = Endpoint(engine, limits or Limits(new_tokens=64, body=100_000, timeout=60), key)
  loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

  async def serve():
    runner = web.AppRunner(endpoint.app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    found.update(port=runner.addresses[0][1], end=asyncio.Event())
    ready.set()
    await found["end"].wait()
    await runner.cleanup()

  thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
  thread.start()
  try:
    assert ready.wait(60)
    yield Running(f"http://127.0.0.1:{found['port']}/v1", engine, endpoint)
  finally:
    loop.call_soon_threadsafe(found["end"].set)
    thread.join()
    loop.close()
    engine.stop()


@pytest.fixture(scope="session")
def serve():
  return running


@pytest.fixture(scope="session")
def served():
  return {name: Served.of(name, models.load(name)) for name in ("embedded:answer", "embedded:policy")}


@pytest.fixture(scope="session")
def server(served):
  with running(served) as found:
    yield found


@pytest.fixture(scope="session")
def client(server):
  with server.client() as found:
    yield found
