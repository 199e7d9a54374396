"""A client for any endpoint of OpenAI's form, as answer model, judge or teacher.

    client = Client("http://127.0.0.1:8000/v1", "embedded:answer", parameters={"temperature": 0}, cache="replies.jsonl")
    replies = client.complete([[("user", "Where does Ann live?")]])

The official package does the talking: it waits and asks again, with jitter and as long as `Retry-After` says, after a
lost connection, a timeout, 408, 409, 429 or 5xx. Many requests are under way at once; the order of the replies is that
of the requests, and one that fails is a reply with an error, not an exception, until so many fail in a row that the
endpoint is down or refuses all. The key comes from the environment and is neither cached nor shown.
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

GIVE_UP = 20  # requests that fail in a row
RESERVED = frozenset({"model", "messages", "stream", "n"})  # what a request holds that is no parameter of it

Messages = Sequence[tuple[str, str]]
"""One conversation: (role, text) of each message."""


@dataclasses.dataclass(frozen=True)
class Reply:
  """What came back for one conversation.

  Attributes:
    text: of the first choice; "" where the request failed.
    finish: why it ended: "stop", "length", ….
    prompt_tokens, completion_tokens: as the endpoint counted them, 0 where it does not.
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
  """Sums over all requests of a client, those whose replies came from the cache and were paid for earlier included.

  `money` is None where no prices were given.
  """

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
    parameters: of every request: temperature, max_tokens, seed, stop, …, also such as only this endpoint knows.

  Raises:
    ValueError: an argument is out of range or no JSON, the variable is not set, the cache is damaged or in use, or the
      package openai is not installed.
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
    parameters: Mapping[str, Any] | None = None,
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
    self.url, self.model, self.prices, self.parameters = url, model, prices, dict(parameters or {})
    for name in RESERVED & self.parameters.keys():
      raise ValueError(f"{name} is no parameter that Client takes: leave it out")
    _canonical(self.parameters)
    self._concurrency, self._key = concurrency, _key(key)
    # The package wants some key, and would take one from the environment that nobody named here.
    self._endpoint = openai.OpenAI(base_url=url, api_key=self._key or "none", timeout=timeout, max_retries=retries)
    self._cache = _Cache(pathlib.Path(os.path.expanduser(cache))) if cache else None
    self._lock = threading.Lock()
    self._replies: list[Reply] = []
    self._failed = 0  # in a row, up to now
    self._times: collections.Counter[str] = collections.Counter()  # that each request was made

  def complete(self, conversations: Sequence[Messages]) -> list[Reply]:
    """Asks for one reply to each conversation, many at once.

    What is asked several times of one client is asked of the endpoint as often, and the cache knows the first reply
    from the second: draws at a temperature stay different, and a second try is one, also in a run that goes on.

    Args:
      conversations: (role, text) of each message.

    Returns:
      A `Reply` for each, in order.

    Raises:
      ValueError: `GIVE_UP` requests failed one after the other.
    """
    requests = [
      {
        "model": self.model,
        "messages": [{"role": role, "content": text} for role, text in messages],
        **self.parameters,
      }
      for messages in conversations
    ]
    names = []
    for request in requests:
      text = _canonical([self.url, request])
      names.append(hashlib.sha256(_canonical([text, self._times[text]]).encode()).hexdigest())
      self._times[text] += 1
    with concurrent.futures.ThreadPoolExecutor(self._concurrency) as pool:
      try:
        return list(pool.map(self._one, requests, names))
      except BaseException:  # interrupted: what has not begun never will
        pool.shutdown(wait=False, cancel_futures=True)
        raise

  def texts(self, conversations: Sequence[Messages]) -> list[str | None]:
    """The texts of `complete`, None where a request failed."""
    return [None if reply.error else reply.text for reply in self.complete(conversations)]

  @property
  def spent(self) -> Spent:
    """What all requests so far took."""
    with self._lock:
      replies = list(self._replies)
    prompt, completion = sum(r.prompt_tokens for r in replies), sum(r.completion_tokens for r in replies)
    money = (prompt * self.prices[0] + completion * self.prices[1]) / 1e6 if self.prices else None
    cached, failed = sum(r.cached for r in replies), sum(bool(r.error) for r in replies)
    return Spent(len(replies), cached, failed, prompt, completion, money)

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
      self._failed = self._failed + 1 if reply.error else 0
      if self._failed >= GIVE_UP:
        raise ValueError(f"the last {self._failed} requests to {self.url} failed, this one by {reply.error}")
    return reply

  def _ask(self, request: dict[str, Any]) -> Reply:
    import openai

    try:
      create = self._endpoint.chat.completions.create
      return _reply(create(model=self.model, messages=request["messages"], extra_body=self.parameters))
    except (openai.OpenAIError, ValueError) as error:  # the latter: it sent something else than a completion
      text = f"{type(error).__name__}: {error}"
      if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        text = f"{text} ({error.__cause__})"  # the package itself only says that there is no connection
      return Reply("", error=(text.replace(self._key, "<key>") if self._key else text)[:500])  # some servers quote it


def _reply(done: Any) -> Reply:
  """Reads what the package made of an answer; it checks nothing, and an endpoint may send whatever it likes."""
  try:
    choice, usage = done.choices[0], done.usage
    text, finish = choice.message.content, choice.finish_reason
    read, written = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
  except (AttributeError, KeyError, IndexError, TypeError):
    raise ValueError(f"the endpoint sent no completion: {checks.shown(done)}") from None
  if not isinstance(text, str):
    raise ValueError(f"the endpoint sent no text, but {checks.shown(text)} (it ended by {checks.shown(finish)})")
  return Reply(text, str(finish or ""), _count(read), _count(written))


def _count(value: Any) -> int:
  return value if type(value) is int and value >= 0 else 0


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
    raise ValueError(f"a request of Client is no JSON ({error}): give texts, numbers, lists and dicts") from None


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
