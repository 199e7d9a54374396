"""What clients ask for: JSON bodies of OpenAI's API, checked and turned into token ids.

What is not supported is refused, never ignored: a reply that silently lacks what was asked for is worse than none. Two
exceptions keep common clients going: fields that change no reply (`user`, `metadata`, …), and `response_format` of type
json_object, which promises nothing here beyond what the prompt asks for.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrimem_jax.checks import shown
from attrimem_jax.serving.engine import ALTERNATIVES, Served

MOST_CHOICES = 128  # of one prompt, and prompts of one request
_HARMLESS = {"model", "stream", "stream_options", "user", "metadata", "store", "service_tier", "prompt_cache_key",
             "safety_identifier"}  # fmt: skip
_SAMPLING = {"max_tokens", "temperature", "top_p", "n", "seed", "stop"}
# Fields that may stand with the value that leaves them without effect.
_IDLE: Mapping[str, tuple] = {
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
  "tools": ([],),
  "functions": ([],),
  "tool_choice": ("none", "auto"),
  "parallel_tool_calls": (True, False),
  "suffix": ("",),
  "best_of": (1,),
  "modalities": (["text"],),
  "response_format": ({"type": "text"}, {"type": "json_object"}),
}
_CHAT = _SAMPLING | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
_COMPLETIONS = _SAMPLING | {"prompt", "logprobs", "echo"}
_EMBEDDINGS = {"input", "encoding_format", "dimensions"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Refused(Exception):
  """A request that is answered with an error, in the form of OpenAI's API."""

  def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
    super().__init__(message)
    self.status, self.param, self.code = status, param, code


@dataclasses.dataclass(frozen=True)
class Generation:
  """A checked request for completions.

  Attributes:
    served: the model.
    prompts: ids of each prompt, not empty.
    count: completions of each prompt.
    limit: most new tokens of each.
    seed: of the draws; None lets the server choose.
    stop: texts that end a completion and are not part of it.
    alternatives: likeliest tokens told at each place; None tells no log-probabilities at all.
    echo: the prompt is part of the reply.
  """

  served: Served
  prompts: Sequence[list[int]]
  count: int
  limit: int
  temperature: float
  top_p: float
  seed: int | None
  stop: tuple[str, ...]
  alternatives: int | None
  echo: bool
  stream: bool
  include_usage: bool


@dataclasses.dataclass(frozen=True)
class Embedding:
  """A checked request for vectors; `tokens` counts those of all texts."""

  served: Served
  texts: Sequence[str]
  tokens: int
  base64: bool


def read(data: bytes) -> dict[str, Any]:
  """The object in a request's body. Raises Refused."""
  try:
    body = json.loads(data.decode("utf-8"))
  except (ValueError, RecursionError) as error:
    raise Refused(400, f"the body is not valid JSON ({str(error)[:100]})", code="invalid_json") from None
  if not isinstance(body, dict):
    raise Refused(400, f"the body is {shown(body)}: send a JSON object", code="invalid_json")
  return body


def chat(served: Mapping[str, Served], body: dict[str, Any], most: int) -> Generation:
  """A body of /v1/chat/completions. `most` is the limit of new tokens, and how many there are if nothing is said."""
  _known(body, _CHAT)
  model = _model(served, body)
  if model.chat is None:
    raise _wrong("model", f"{model.id!r} has no ChatML template: use /v1/completions", code="model_not_supported")
  messages = body.get("messages")
  if not isinstance(messages, list) or not messages:
    raise _wrong("messages", f"messages is {shown(messages)}: give a list of messages, not empty")
  pairs = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
  alternatives = None
  if _flag(body, "logprobs"):
    alternatives = _whole(body, "top_logprobs", 0, ALTERNATIVES) or 0
  elif body.get("top_logprobs") is not None:
    raise _wrong("top_logprobs", "top_logprobs needs logprobs to be true")
  newer = "max_completion_tokens"
  name = newer if body.get(newer) is not None else "max_tokens"
  prompt = _encoded("messages", lambda: model.chat.prompt(pairs))
  return _generation(model, body, [prompt], _whole(body, name, 1), name, most, alternatives)


def completions(served: Mapping[str, Served], body: dict[str, Any], most: int) -> Generation:
  """A body of /v1/completions. Prompts are plain text, or ids: text never becomes a control token, ids may be any."""
  _known(body, _COMPLETIONS)
  model = _model(served, body)
  limit = _whole(body, "max_tokens", 0)
  prompts = _prompts(model, body.get("prompt"))
  alternatives = _whole(body, "logprobs", 0, ALTERNATIVES)
  return _generation(model, body, prompts, 16 if limit is None else limit, "max_tokens", most, alternatives)


def embeddings(served: Mapping[str, Served], body: dict[str, Any]) -> Embedding:
  """A body of /v1/embeddings."""
  _known(body, _EMBEDDINGS)
  model = _model(served, body)
  given = body.get("input")
  texts = [given] if isinstance(given, str) else given
  if not isinstance(texts, list) or not texts or len(texts) > 2048 or not all(isinstance(t, str) and t for t in texts):
    what = (
      "give a text or a list of 1 to 2048, none empty (not ids: those of another vocabulary would mean other words)"
    )
    raise _wrong("input", f"input is {shown(given)}: {what}")
  lengths = [len(_encoded(f"input[{i}]", lambda text=text: model.model.tokenizer.encode(text)))
             for i, text in enumerate(texts)]  # fmt: skip
  room = model.model.config.max_positions - 1
  if max(lengths) > room:
    raise _too_long("input", f"a text of {max(lengths)} tokens", room)
  width = model.model.config.width
  if _whole(body, "dimensions", 1) not in (None, width):
    raise _wrong("dimensions", f"vectors of {model.id!r} have {width} dimensions and cannot be shortened")
  form = body.get("encoding_format") or "float"
  if form not in ("float", "base64"):
    raise _wrong("encoding_format", f"encoding_format is {shown(form)}: use float or base64")
  return Embedding(model, texts, sum(lengths), form == "base64")


def _generation(model: Served, body, prompts, limit, limit_name, most, alternatives) -> Generation:
  positions = model.model.config.max_positions
  longest = max(map(len, prompts))
  room = positions - max(longest, 2)  # a prompt of one token is read behind another
  if room < (1 if limit is None else limit):
    what = f"a prompt of {longest} tokens" + (f" and {limit} new ones" if limit else "")
    raise _too_long("messages" if "messages" in body else "prompt", what, positions)
  if limit is not None and limit > most:
    raise _wrong(limit_name, f"{limit_name} is {limit}: this server gives at most {most}")
  options = body.get("stream_options")
  if options is not None and not isinstance(options, dict):
    raise _wrong("stream_options", f"stream_options is {shown(options)}: give an object")
  temperature = _number(body, "temperature", 1.0, 2.0)
  return Generation(
    served=model,
    prompts=prompts,
    count=_whole(body, "n", 1, MOST_CHOICES) or 1,
    limit=min(most, room) if limit is None else limit,
    temperature=temperature if temperature >= 1e-6 else 0.0,  # float32 could not divide by less
    top_p=max(_number(body, "top_p", 1.0, 1.0), 1e-6),
    seed=_whole(body, "seed", -(2**63), 2**63 - 1),
    stop=_stop(body),
    alternatives=alternatives,
    echo=_flag(body, "echo"),
    stream=_flag(body, "stream"),
    include_usage=_flag(options or {}, "include_usage"),
  )


def _known(body: dict[str, Any], fields: set[str]) -> None:
  for name, value in body.items():
    if name in fields or name in _HARMLESS or value is None:
      continue
    if name not in _IDLE:
      raise _wrong(
        name, f"{name[:80]!r} is no field of this request, or is not supported: leave it out", "unknown_parameter"
      )
    if not any(value == idle and isinstance(value, type(idle)) | (idle == 0) for idle in _IDLE[name]):
      raise _wrong(name, f"{name} is {shown(value)}, which is not supported: leave it out", "unsupported_parameter")


def _model(served: Mapping[str, Served], body: dict[str, Any]) -> Served:
  name = body.get("model")
  if not isinstance(name, str):
    raise _wrong("model", f"model is {shown(name)}: name one of {', '.join(served)}")
  if name not in served:
    message = f"the model {shown(name)} does not exist; there are {', '.join(served)}"
    raise Refused(404, message, param="model", code="model_not_found")
  return served[name]


def _message(where: str, message: Any) -> tuple[str, str]:
  """(role, text) of a message; a content of several parts is their text, one after the other."""
  if not isinstance(message, dict):
    raise _wrong(where, f"{where} is {shown(message)}: give an object with role and content")
  role, content = message.get("role"), message.get("content")
  if not isinstance(role, str) or role not in _ROLES:
    raise _wrong(f"{where}.role", f"{where}.role is {shown(role)}: use one of {', '.join(_ROLES)}")
  if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
    texts = [part.get("text") for part in content]
    content = "".join(texts) if all(isinstance(text, str) for text in texts) else texts
  if not isinstance(content, str):
    raise _wrong(f"{where}.content", f"{where}.content is {shown(content)}: give a text, or parts of type text")
  return _ROLES[role], content


def _prompts(model: Served, given: Any) -> list[list[int]]:
  prompts = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
  if len(prompts) > MOST_CHOICES:
    raise _wrong("prompt", f"there are {len(prompts)} prompts: send at most {MOST_CHOICES} in a request")
  found = []
  for i, prompt in enumerate(prompts):
    where = "prompt" if prompts is not given else f"prompt[{i}]"
    if isinstance(prompt, str):
      prompt = _encoded(where, lambda text=prompt: model.model.tokenizer.encode(text))
    elif not isinstance(prompt, list) or not all(type(id) is int for id in prompt):
      raise _wrong("prompt", f"{where} is {shown(prompt)}: give a text, a list of ids, or a list of either")
    if not prompt:
      raise _wrong("prompt", f"{where} is empty: give at least one token")
    if not all(0 <= id < model.model.config.vocab_size for id in prompt):
      raise _wrong("prompt", f"{where} holds an id that is not one of 0 to {model.model.config.vocab_size - 1}")
    found.append(prompt)
  return found


def _encoded(param: str, encode) -> list[int]:
  try:
    return encode()
  except ValueError as error:
    raise _wrong(param, f"{param}: {error}") from None


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
  given = body.get("stop")
  texts = [] if given is None else [given] if isinstance(given, str) else given
  if not isinstance(texts, list) or len(texts) > 4 or not all(isinstance(text, str) and text for text in texts):
    raise _wrong("stop", f"stop is {shown(given)}: give a text or a list of at most 4, none empty")
  for text in texts:
    _encoded("stop", text.encode)
  return tuple(texts)


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value is not None and not isinstance(value, bool):
    raise _wrong(name, f"{name} is {shown(value)}: use true or false")
  return bool(value)


def _whole(body: dict[str, Any], name: str, least: int, most: int | None = None) -> int | None:
  value = body.get(name)
  if value is None:
    return None
  if type(value) is not int or value < least or (most is not None and value > most):
    raise _wrong(
      name, f"{name} is {shown(value)}: use a whole number, {least} " + (f"to {most}" if most else "or more")
    )
  return value


def _number(body: dict[str, Any], name: str, default: float, most: float) -> float:
  value = body.get(name)
  if value is None:
    return default
  if (
    isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most or not math.isfinite(value)
  ):
    raise _wrong(name, f"{name} is {shown(value)}: use a number from 0 to {most:g}")
  return float(value)


def _wrong(param: str, message: str, code: str = "invalid_value") -> Refused:
  return Refused(400, message, param=param, code=code)


def _too_long(param: str, what: str, room: int) -> Refused:
  message = f"{what} exceeds the context of {room} tokens: shorten it"
  return Refused(400, message, param=param, code="context_length_exceeded")
