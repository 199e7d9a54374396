"""Completions as JSON objects of OpenAI's API: texts, stop strings, log-probabilities, usage, chunks of a stream."""

import base64
import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from attrimem_jax.serving.engine import Reply, Scores
from attrimem_jax.serving.requests import Embedding, Generation
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
  """One completion as it is told. `ids` are the tokens of `text`, the prompt's first where it is echoed."""

  text: str
  ids: list[int]
  finish: str
  scores: Scores | None
  used: int


def choices(request: Generation, replies: Sequence[Sequence[Reply]]) -> list[Choice]:
  """All completions of the first prompt, then those of the second, …"""
  return [
    _choice(request, prompt, reply) for prompt, group in zip(request.prompts, replies, strict=True) for reply in group
  ]


def _choice(request: Generation, prompt: list[int], reply: Reply) -> Choice:
  tokenizer = request.served.model.tokenizer
  said = reply.ids[:-1] if reply.finish == Finish.STOP else reply.ids
  pieces = tokenizer.pieces(said)
  data, finish, used = b"".join(pieces), str(reply.finish), len(reply.ids)
  found = [data.find(stop.encode()) for stop in request.stop]
  if any(place >= 0 for place in found):
    end, at = min(place for place in found if place >= 0), 0
    kept = []
    for id, piece in zip(said, pieces, strict=True):
      if at >= end:
        break
      kept.append(id)
      at += len(piece)
    data, said, finish, used = data[:end], kept, "stop", len(kept)
  scores = None
  if reply.scores is not None:
    start = 0 if request.echo else len(prompt)
    part = slice(start, len(prompt) + len(said))
    scores = Scores(*(getattr(reply.scores, field.name)[part] for field in dataclasses.fields(Scores)))
  if request.echo:
    data, said = b"".join(tokenizer.pieces(prompt)) + data, [*prompt, *said]
  return Choice(data.decode(errors="replace"), said, finish, scores, used)


def usage(request: Generation, told: Sequence[Choice]) -> dict[str, int]:
  """Every prompt counts once, however many completions it got."""
  prompt, completion = sum(map(len, request.prompts)), sum(choice.used for choice in told)
  return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def chat(head: dict[str, Any], request: Generation, told: Sequence[Choice]) -> dict[str, Any]:
  """The reply of /v1/chat/completions; `head` holds id, created and model."""
  found = [
    {
      "index": i,
      "message": {"role": "assistant", "content": choice.text},
      "logprobs": _chat_logprobs(request, choice),
      "finish_reason": choice.finish,
    }
    for i, choice in enumerate(told)
  ]
  return {**head, "object": "chat.completion", "choices": found, "usage": usage(request, told)}


def completions(head: dict[str, Any], request: Generation, told: Sequence[Choice]) -> dict[str, Any]:
  """The reply of /v1/completions."""
  found = [
    {"index": i, "text": choice.text, "logprobs": _logprobs(request, choice), "finish_reason": choice.finish}
    for i, choice in enumerate(told)
  ]
  return {**head, "object": "text_completion", "choices": found, "usage": usage(request, told)}


class Stream:
  """The chunks of a streamed reply: text as soon as it is sure, then what ends each choice.

  Sure is what is whole characters and cannot turn out to begin a text to stop at. With log-probabilities, which are
  known at the end alone, nothing is told before.

  Args:
    head: id, created and model.
    request: that is answered.
    chat: whether it was one for a chat.
  """

  def __init__(self, head: dict[str, Any], request: Generation, chat: bool):
    self._request, self._chat = request, chat
    self._head = {**head, "object": "chat.completion.chunk" if chat else "text_completion"}
    self._sent = [-1] * (len(request.prompts) * request.count)  # characters of each choice; -1: not begun

  def hear(self, prompt: int, rows: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Of the completions of one prompt so far, what is sure and was not told yet."""
    if self._request.alternatives is not None:
      return
    for i, ids in enumerate(rows):
      index = prompt * self._request.count + i
      yield from self._more(index, _sure(self._request, self._request.prompts[prompt], ids))

  def end(self, told: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    """The rest of every choice, how it ended, and the usage if that was asked for."""
    for i, choice in enumerate(told):
      logprobs = (_chat_logprobs if self._chat else _logprobs)(self._request, choice)
      yield from self._more(i, choice.text, logprobs)
      yield self._chunk(i, "", finish=choice.finish)
    if self._request.include_usage:
      yield {**self._head, "choices": [], "usage": usage(self._request, told)}

  def _more(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    if self._sent[index] < 0:
      self._sent[index] = 0
      if self._chat:
        yield self._chunk(index, "", role={"role": "assistant"})
    if len(text) > self._sent[index]:
      yield self._chunk(index, text[self._sent[index] :], logprobs=logprobs)
      self._sent[index] = len(text)

  def _chunk(self, index: int, text: str, *, role=None, logprobs=None, finish=None) -> dict[str, Any]:
    said = {"delta": {**role, "content": ""} if role else {"content": text} if text else {}}
    choice = {"index": index, **(said if self._chat else {"text": text}), "logprobs": logprobs, "finish_reason": finish}
    return {**self._head, "choices": [choice]}


def _sure(request: Generation, prompt: Sequence[int], ids: Sequence[int]) -> str:
  tokenizer = request.served.model.tokenizer
  data = b"".join(tokenizer.pieces(ids))
  stops = [stop.encode() for stop in request.stop]
  ends = [data.find(stop) for stop in stops if stop in data]
  # "…th" may go on to be "the": the longest end of the data that begins a text to stop at is held back.
  ends += [len(data) - n for stop in stops for n in range(1, len(stop)) if data.endswith(stop[:n])]
  before = b"".join(tokenizer.pieces(prompt)) if request.echo else b""
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  return decoder.decode(before + data[: min(ends, default=len(data))])


def embeddings(request: Embedding, vectors: np.ndarray) -> dict[str, Any]:
  """The reply of /v1/embeddings, as numbers or as the base64 of little-endian float32."""
  rows = vectors.astype("<f4")
  told = [base64.b64encode(row.tobytes()).decode() if request.base64 else row.tolist() for row in rows]
  data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(told)]
  counted = {"prompt_tokens": request.tokens, "total_tokens": request.tokens}
  return {"object": "list", "data": data, "model": request.served.id, "usage": counted}


def _chat_logprobs(request: Generation, choice: Choice) -> dict[str, Any] | None:
  if choice.scores is None:
    return None
  tokenizer, scores = request.served.model.tokenizer, choice.scores
  content = [
    _token(tokenizer, id, scores.logps[t])
    | {"top_logprobs": [_token(tokenizer, *top) for top in _top(scores, t, request.alternatives or 0)]}
    for t, id in enumerate(choice.ids)
  ]
  return {"content": content, "refusal": None}


def _top(scores: Scores, t: int, count: int) -> Iterator[tuple[int, float]]:
  return zip(scores.top_ids[t, :count].tolist(), scores.top_logps[t, :count].tolist(), strict=True)


def _token(tokenizer: Tokenizer, id: int, logp: float) -> dict[str, Any]:
  data = tokenizer.bytes(id)
  return {"token": data.decode(errors="replace"), "logprob": float(logp), "bytes": list(data)}


def _logprobs(request: Generation, choice: Choice) -> dict[str, Any] | None:
  """The older form: parallel lists. The first token of an echoed prompt has no log-probability."""
  if choice.scores is None:
    return None
  tokenizer, scores = request.served.model.tokenizer, choice.scores
  pieces = tokenizer.pieces(choice.ids)
  tokens = [piece.decode(errors="replace") for piece in pieces]
  logps = [None if np.isnan(logp) else float(logp) for logp in scores.logps]
  # The token that was drawn is always among those told.
  likeliest = [
    None
    if logp is None
    else {tokenizer.bytes(id).decode(errors="replace"): p for id, p in _top(scores, t, request.alternatives or 0)}
    | {tokens[t]: logp}
    for t, logp in enumerate(logps)
  ]
  told = likeliest if request.alternatives else None
  return {"tokens": tokens, "token_logprobs": logps, "top_logprobs": told, "text_offset": _offsets(pieces)}


def _offsets(pieces: Sequence[bytes]) -> list[int]:
  """For each token, how many characters have begun before it."""
  found, at = [], 0
  for piece in pieces:
    found.append(at)
    at += sum(byte & 0xC0 != 0x80 for byte in piece)  # bytes that begin a character
  return found
