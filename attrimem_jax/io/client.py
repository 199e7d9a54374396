"""A client for any endpoint of OpenAI's form, as answer model, judge or teacher.

    client = Client("http://127.0.0.1:8000/v1", "embedded:answer", cache="runs/replies.jsonl")
    replies = client.complete([[{"role": "user", "content": "Where does Ann live?"}]], temperature=0, max_tokens=32)

The official package does the talking: it waits and asks again, with jitter and as long as `Retry-After` says, after a
lost connection, a timeout, 408, 409, 429 or 5xx. Many requests are under way at once; the order of the replies is that
of the requests, and one that fails is a reply with an error, not an exception. The key comes from the environment and
is neither cached nor shown.
"""

import collections
import concurrent.futures
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from attrimem_jax import checks

Messages = Sequence[Mapping[str, Any]]
"""One conversation: [{"role": "user", "content": "…"}, …]."""


@dataclasses.dataclass(frozen=True)
class Reply:
  """What came back for one conversation.

  Attributes:
    text: of the first choice; "" where the request failed.
    finish: why it ended: "stop", "length", ….
    prompt_tokens, completion_tokens: as the endpoint counted them; those of a cached reply were spent earlier.
    cached: whether it was read from the cache.
    error: why the request failed, "" where it did not.
  """

  text: str
  finish: str = ""
  prompt_tokens: int = 0
  completion_tokens: int = 0
  cached: bool = False
  error: str = ""


@dataclasses.dataclass(frozen=True)
class Spent:
  """Sums over all requests of a client. `money` is None where no prices were given; cached replies cost nothing."""

  requests: int
  cached: int
  failed: int
  prompt_tokens: int
  completion_tokens: int
  money: float | None


class Client:
  """Asks one model of one endpoint.

  Args:
    url: of the endpoint, with its /v1.
    model: its name there.
    key: the environment variable that holds the API key; "" for an endpoint that asks for none.
    cache: a file of JSON lines that replies are kept in, each under the SHA-256 of its request; "" keeps none. One
      process at a time may use it. Failures are not kept.
    concurrency: most requests under way at once.
    timeout: seconds of one try.
    retries: further tries of a request.
    prices: money for a million tokens, (of prompts, of completions).

  Raises:
    ValueError: an argument is out of range, the variable is not set, the cache is damaged or in use, or the package
      openai is not installed.
  """

  def __init__(
    self,
    url: str,
    model: str,
    *,
    key: str = "",
    cache: str | os.PathLike[str] = "",
    concurrency: int = 8,
    timeout: float = 120,
    retries: int = 5,
    prices: tuple[float, float] | None = None,
  ):
    try:
      import openai
    except ImportError:
      raise ValueError("talking to an endpoint needs the openai package: pip install 'attrimem-jax[client]'") from None
    checks.text("url of Client", url, empty=False)
    checks.text("model of Client", model, empty=False)
    checks.whole("concurrency of Client", concurrency, 1, 1024)
    checks.real("timeout of Client", timeout, 0)
    checks.whole("retries of Client", retries, 0, 100)
    for price in prices or ():
      checks.real("prices of Client", price, 0, closed=True)
    self.url, self.model, self.prices = url, model, prices
    self._concurrency, self._key = concurrency, _key(key)
    # The package wants some key, and would take one from the environment that nobody named here.
    self._endpoint = openai.OpenAI(base_url=url, api_key=self._key or "none", timeout=timeout, max_retries=retries)
    self._cache = _Cache(pathlib.Path(os.path.expanduser(cache))) if cache else None
    self._lock = threading.Lock()
    self._replies: list[Reply] = []

  def complete(self, conversations: Sequence[Messages], **parameters: Any) -> list[Reply]:
    """Asks for one reply to each conversation, many at once.

    A conversation that stands several times in the list is asked about as often, and each of its replies is cached for
    its place among them: draws at a temperature stay different, also when they come from the cache.

    Args:
      conversations: lists of messages.
      parameters: of the request: temperature, max_tokens, seed, stop, ….

    Returns:
      A `Reply` for each, in order.

    Raises:
      ValueError: messages or parameters are no JSON.
    """
    for name in ("model", "messages", "stream", "n"):
      if name in parameters:
        raise ValueError(f"{name} is no parameter of Client.complete: leave it out")
    requests = [{"model": self.model, "messages": list(messages), **parameters} for messages in conversations]
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for request in requests:
      text = _canonical([self.url, request])
      names.append(hashlib.sha256(_canonical([text, seen[text]]).encode()).hexdigest())
      seen[text] += 1
    with concurrent.futures.ThreadPoolExecutor(self._concurrency) as pool:
      try:
        return list(pool.map(self._one, requests, names))
      except BaseException:  # interrupted: what has not begun never will
        pool.shutdown(wait=False, cancel_futures=True)
        raise

  @property
  def spent(self) -> Spent:
    """What all requests so far took."""
    with self._lock:
      asked = [reply for reply in self._replies if not reply.cached]
      prompt, completion = sum(r.prompt_tokens for r in asked), sum(r.completion_tokens for r in asked)
      money = (prompt * self.prices[0] + completion * self.prices[1]) / 1e6 if self.prices else None
      failed = sum(bool(reply.error) for reply in asked)
      return Spent(len(asked), len(self._replies) - len(asked), failed, prompt, completion, money)

  def close(self) -> None:
    """Closes connections and the cache."""
    self._endpoint.close()
    if self._cache is not None:
      self._cache.close()

  def __enter__(self) -> "Client":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def __repr__(self) -> str:
    return f"Client({self.url!r}, {self.model!r})"

  def _one(self, request: dict[str, Any], name: str) -> Reply:
    reply = self._cache.get(name) if self._cache is not None else None
    if reply is None:
      reply = self._ask(request)
      if self._cache is not None and not reply.error:
        self._cache.put(name, reply)
    with self._lock:
      self._replies.append(reply)
    return reply

  def _ask(self, request: dict[str, Any]) -> Reply:
    import openai

    try:
      done = self._endpoint.chat.completions.create(**request)
      return _reply(done)
    except (openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
      # The latter three: the endpoint sent something else than a completion, or the package knows no such parameter.
      text = f"{type(error).__name__}: {error}"
      return Reply("", error=(text.replace(self._key, "<key>") if self._key else text)[:500])  # some servers quote it


def _reply(done: Any) -> Reply:
  if not getattr(done, "choices", None) or not isinstance(done.choices[0].message.content, str):
    raise ValueError(f"the endpoint sent no text: {checks.shown(done)}")
  choice, usage = done.choices[0], done.usage
  counted = (usage.prompt_tokens or 0, usage.completion_tokens or 0) if usage else (0, 0)
  return Reply(choice.message.content, choice.finish_reason or "", *counted)


def _key(variable: str) -> str:
  if not variable:
    return ""
  value = os.environ.get(variable, "")
  if not value:
    raise ValueError(f"${variable} is not set: put the API key of the endpoint into it, or give key=''")
  return value


def _canonical(value: Any) -> str:
  try:
    return json.dumps(value, sort_keys=True, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"a request of Client.complete is no JSON ({error}): give texts, numbers, lists and dicts"
    ) from None


class _Cache:
  """Replies by the hash of their requests, in a file of JSON lines that is appended to.

  A process that was killed may leave a last line without its end: it is dropped. Any other line that cannot be read
  is an error.
  """

  def __init__(self, path: pathlib.Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._path, self._lock = path, threading.Lock()
    self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115 (held until `close`)
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      self._file.close()
      raise ValueError(f"another process uses the cache {path}: wait for it, or give another file") from None
    try:
      self._found = self._read()
    except BaseException:
      self._file.close()
      raise

  def get(self, name: str) -> Reply | None:
    with self._lock:
      return self._found.get(name)

  def put(self, name: str, reply: Reply) -> None:
    kept = {field: getattr(reply, field) for field in _KEPT}
    line = json.dumps({"request": name, **kept}) + "\n"
    with self._lock:
      self._file.write(line.encode())
      self._file.flush()
      self._found[name] = dataclasses.replace(reply, cached=True)

  def close(self) -> None:
    self._file.close()

  def _read(self) -> dict[str, Reply]:
    self._file.seek(0)
    data = self._file.read()
    whole = data[: data.rfind(b"\n") + 1]
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
      try:
        row = json.loads(line)
        found[row["request"]] = Reply(**{field: row[field] for field in _KEPT}, cached=True)
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
          f"{self._path}, line {number}: no reply ({type(error).__name__}: {error}); remove the line, or the file"
        ) from None
    if len(whole) < len(data):
      self._file.truncate(len(whole))
    return found


_KEPT = ("text", "finish", "prompt_tokens", "completion_tokens")
