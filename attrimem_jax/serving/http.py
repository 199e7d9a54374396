"""The endpoint: routes, limits, errors in OpenAI's form, and a stop that loses no request.

Whatever a client sends gets an answer: 400 (not valid, or too long for the model), 401 (key), 404 (model or path), 408
(the body did not come), 413 (the body is too large), 429 with Retry-After (too much waits), 503 (stopping), 504 (took
too long). A client that goes away takes its prompts out of the queue.
"""

import asyncio
import dataclasses
import functools
import hmac
import itertools
import json
import logging
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from aiohttp import web

from attrimem_jax.io.clock import unix_time
from attrimem_jax.rollout.writing import fold
from attrimem_jax.serving import replies, requests
from attrimem_jax.serving.engine import EmbedJob, Engine, Full, Job, Stopped
from attrimem_jax.serving.requests import Generation, Refused

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_AFTER = "1"  # seconds
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a request may take: new tokens of a completion, bytes of a body, seconds; and seconds that a stop waits."""

  new_tokens: int = 1024
  body: int = 1_000_000
  timeout: float = 600
  grace: float = 30


class Endpoint:
  """The application over an engine.

  Args:
    engine: holds the models.
    limits: of a request.
    key: what clients must send as `Authorization: Bearer <key>`; "" asks for none.
    seed: of the draws of requests that bring no seed.
  """

  def __init__(self, engine: Engine, limits: Limits, key: str = "", seed: int = 0):
    self._engine, self._limits, self._key = engine, limits, key
    self._numbers, self._root = itertools.count(), jax.random.key(seed)
    self.open = 0  # requests that have no answer yet
    self.stopping = False
    self.app = web.Application(middlewares=[self._answer_always], client_max_size=limits.body)
    self.app.add_routes(
      [
        web.get("/health", self._health),
        web.get("/v1/models", self._models),
        web.get("/v1/models/{id:.+}", self._model),
        web.post("/v1/chat/completions", self._chat),
        web.post("/v1/completions", self._completions),
        web.post("/v1/embeddings", self._embeddings),
      ]
    )

  @web.middleware
  async def _answer_always(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    self.open += 1
    try:
      if request.path != "/health":
        self._admit(request)
      return await handler(request)
    except Exception as error:
      status, body, headers = _told(error)
      if isinstance(error, web.HTTPException):
        body["error"]["message"] = f"{request.method} {request.path[:200]}: {error.reason}"
      return web.json_response(body, status=status, headers=headers)
    finally:
      self.open -= 1

  def _admit(self, request: web.Request) -> None:
    given = request.headers.get("Authorization", "")
    if self._key and not hmac.compare_digest(given.encode(errors="replace"), f"Bearer {self._key}".encode()):
      raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")
    if self.stopping:
      raise Stopped("the server is stopping")

  async def _health(self, request: web.Request) -> web.Response:
    state = {"status": "stopping" if self.stopping else "ok", "open": self.open - 1, "waiting": self._engine.waiting}
    return web.json_response(state, status=503 if self.stopping else 200)

  async def _models(self, request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_described(id) for id in self._engine.served]})

  async def _model(self, request: web.Request) -> web.Response:
    id = request.match_info["id"]
    if id not in self._engine.served:
      raise Refused(404, f"the model {id[:100]!r} does not exist", param="model", code="model_not_found")
    return web.json_response(_described(id))

  async def _chat(self, request: web.Request) -> web.StreamResponse:
    return await self._generate(request, requests.chat, "chatcmpl", replies.chat)

  async def _completions(self, request: web.Request) -> web.StreamResponse:
    return await self._generate(request, requests.completions, "cmpl", replies.completions)

  async def _generate(self, request: web.Request, check, prefix: str, whole) -> web.StreamResponse:
    body = await self._body(request)
    # Long prompts take a while to become ids: not on the thread that answers everybody.
    asked: Generation = await asyncio.to_thread(check, self._engine.served, body, self._limits.new_tokens)
    number = next(self._numbers)
    jobs = await asyncio.to_thread(self._jobs, asked, number)
    head = {"id": f"{prefix}-{number}", "created": unix_time(), "model": asked.served.id}
    if asked.stream:
      return await self._stream(request, asked, jobs, replies.Stream(head, asked, whole is replies.chat))
    return web.json_response(whole(head, asked, replies.choices(asked, await self._run(jobs))))

  async def _stream(
    self, request: web.Request, asked: Generation, jobs: Sequence[Job], stream: replies.Stream
  ) -> web.StreamResponse:
    """Sends events as they come. What fails before the first is an ordinary error, later an event that tells it."""
    loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, list[list[int]]] | None]()

    def heard(prompt: int, rows: list[list[int]]) -> None:
      loop.call_soon_threadsafe(news.put_nowait, (prompt, rows))

    jobs = [dataclasses.replace(job, heard=functools.partial(heard, p)) for p, job in enumerate(jobs)]
    running = asyncio.ensure_future(self._run(jobs))
    running.add_done_callback(lambda _: news.put_nowait(None))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def send(events: Iterable[str]) -> None:
      for event in events:
        if not response.prepared:
          await response.prepare(request)
        await response.write(f"data: {event}\n\n".encode())

    try:
      while (item := await news.get()) is not None:
        await send(map(json.dumps, stream.hear(*item)))
      await send(map(json.dumps, stream.end(replies.choices(asked, await running))))
      await send(["[DONE]"])
    except ConnectionError:  # the client has gone
      return response
    except Exception as error:
      if not response.prepared:
        raise
      await send([json.dumps(_told(error)[1])])
    finally:
      running.cancel()
    await response.write_eof()
    return response

  def _jobs(self, asked: Generation, number: int) -> list[Job]:
    """A key for each row: folded from the request's seed, or from its number, and from prompt and choice."""
    P, n = len(asked.prompts), asked.count
    source = (0, number, 0) if asked.seed is None else (1, asked.seed % 2**32, (asked.seed >> 32) % 2**32)
    paths = [[(*(part % 2**32 for part in source), p, i) for i in range(n)] for p in range(P)]
    keys = fold(self._root if asked.seed is None else jax.random.key(0), np.array(paths, np.uint32))
    scored = asked.alternatives is not None
    return [
      Job(asked.served, prompt, keys[p], asked.limit, asked.temperature, asked.top_p, scored, asked.stop)
      for p, prompt in enumerate(asked.prompts)
    ]

  async def _embeddings(self, request: web.Request) -> web.Response:
    body = await self._body(request)
    asked = await asyncio.to_thread(requests.embeddings, self._engine.served, body)
    (vectors,) = await self._run([EmbedJob(asked.served, asked.texts)])
    return web.json_response(replies.embeddings(asked, vectors))

  async def _body(self, request: web.Request) -> dict[str, Any]:
    try:
      async with asyncio.timeout(self._limits.timeout):
        data = await request.read()
    except TimeoutError:
      raise Refused(408, f"the body did not come within {self._limits.timeout} s", code="timeout") from None
    except web.HTTPRequestEntityTooLarge:
      raise Refused(413, f"the body is larger than {self._limits.body} bytes", code="body_too_large") from None
    return requests.read(data)

  async def _run(self, jobs: Sequence[Job | EmbedJob]) -> list:
    """The results of all jobs. Where nobody waits any longer, those that have not begun never will."""
    if len(jobs) > self._engine.queue:
      raise Refused(400, f"{len(jobs)} prompts in a request, but only {self._engine.queue} may wait: send fewer")
    self._engine.submit(jobs)
    try:
      async with asyncio.timeout(self._limits.timeout):
        return await asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
    except TimeoutError:
      message = f"the request took longer than {self._limits.timeout} s"
      raise Refused(504, message, code="timeout") from None
    finally:
      for job in jobs:
        job.gone.set()
        job.done.cancel()


async def serve(endpoint: Endpoint, engine: Engine, limits: Limits, host: str, port: int) -> None:
  """Listens until SIGTERM or SIGINT; then takes nothing new, answers what it has taken, and returns.

  What has not begun after `limits.grace` seconds is answered with 503. A second signal ends the process at once.

  Raises:
    OSError: host or port cannot be listened on.
  """
  asked = asyncio.Event()
  loop = asyncio.get_running_loop()

  def stop(number: int) -> None:
    asked.set()
    for each in (signal.SIGTERM, signal.SIGINT):
      loop.remove_signal_handler(each)

  runner = web.AppRunner(endpoint.app, handler_cancellation=True, access_log=None, shutdown_timeout=5)
  await runner.setup()
  site = web.TCPSite(runner, host, port, backlog=1024)
  try:
    await site.start()
    for number in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(number, stop, number)
    print(f"listening on http://{host}:{runner.addresses[0][1]}/v1, models {', '.join(engine.served)}", flush=True)
    await asked.wait()
    print(f"stopping: {endpoint.open} requests are still to be answered", flush=True)
    endpoint.stopping = True
    await site.stop()
    await _answered(endpoint, limits.grace)
    await asyncio.to_thread(engine.stop)
    await _answered(endpoint, 5)
  finally:
    await runner.cleanup()


async def _answered(endpoint: Endpoint, seconds: float) -> None:
  """Returns once no request is open, or after so many seconds."""
  try:
    async with asyncio.timeout(seconds):
      while endpoint.open:
        await asyncio.sleep(0.02)
  except TimeoutError:
    pass


def _described(id: str) -> dict[str, Any]:
  return {"id": id, "object": "model", "created": 0, "owned_by": "attrimem_jax"}


def _told(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
  """(status, body, headers) of the answer to a request that failed."""
  status, message, param, code, headers = 500, "the server failed at this request; its log says why", None, None, {}
  match error:
    case Refused():
      status, message, param, code = error.status, str(error), error.param, error.code
    case Full():
      status, message, code, headers = 429, f"{error}; try again", "queue_full", {"Retry-After": _RETRY_AFTER}
    case Stopped():
      status, message, code, headers = 503, str(error), "stopping", {"Retry-After": _RETRY_AFTER}
    case web.HTTPException():
      status, message = error.status, error.reason
      headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    case _:
      logging.getLogger(__name__).error("a request failed", exc_info=error)
  kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
  return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers
