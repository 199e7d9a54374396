"""Completions as JSON objects of OpenAI's API: texts, stop strings, log-probabilities, usage, chunks of a stream."""

import base64
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


def chat_chunks(head: dict[str, Any], request: Generation, told: Sequence[Choice]) -> Iterator[dict[str, Any]]:
  """The chunks of a stream: for each choice its role, its whole text, its end."""
  head = {**head, "object": "chat.completion.chunk"}
  for i, choice in enumerate(told):
    text = {"content": choice.text}
    yield {**head, "choices": [_delta(i, {"role": "assistant", "content": ""})]}
    yield {**head, "choices": [{**_delta(i, text), "logprobs": _chat_logprobs(request, choice)}]}
    yield {**head, "choices": [{**_delta(i, {}), "finish_reason": choice.finish}]}
  if request.include_usage:
    yield {**head, "choices": [], "usage": usage(request, told)}


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
  return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def completion_chunks(head: dict[str, Any], request: Generation, told: Sequence[Choice]) -> Iterator[dict[str, Any]]:
  """The chunks of a stream: one whole choice each."""
  whole = completions(head, request, told)
  for choice in whole["choices"]:
    yield {**head, "object": "text_completion", "choices": [choice]}
  if request.include_usage:
    yield {**head, "object": "text_completion", "choices": [], "usage": whole["usage"]}


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
