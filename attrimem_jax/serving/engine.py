"""The worker behind the endpoint: one thread that takes waiting prompts and runs those of one shape together.

Each prompt is a prefix of its own, read once for all completions that are asked of it (`rollout.sampling.complete`);
its last token is the row from which they go on. A row draws from its own key, so a reply depends neither on the batch
that it ran in nor on what was asked before. Where somebody streams or gave texts to stop at, the sampler is watched:
every few tokens the new ones are told, and rows end whose text holds such a text, or whose client has gone.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attrimem_jax.io.models import LanguageModel
from attrimem_jax.memory.retrieval import Embed, last_token_embed, pack_whole
from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import bucket
from attrimem_jax.rollout.sampling import Sampling, Watch, complete
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish

ALTERNATIVES = 20  # likeliest tokens that are told at every position, where log-probabilities are asked for
_STEP = 128  # prompts are padded to multiples of it
_SCORED_ROWS = 8  # rows that are scored together


class Full(Exception):
  """More prompts wait than may; nothing of the request was taken."""


class Stopped(Exception):
  """The worker has stopped, or stopped before it came to this prompt."""


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
  """A model as the endpoint serves it. `chat` is None where its template is not ChatML."""

  id: str
  model: LanguageModel
  chat: Chat | None
  embed: Embed

  @classmethod
  def of(cls, id: str, model: LanguageModel, thinking: bool | None = False) -> "Served":
    try:
      chat = Chat(model.tokenizer, thinking=thinking)
    except ValueError:
      chat = None
    return cls(id, model, chat, last_token_embed(model.config, model.params, model.tokenizer))


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
  """Log-probabilities at temperature 1 of a sequence of T ids, each after those before it; the first has none.

  Attributes:
    logps: float32 [T], NaN at 0.
    top_ids: int32 [T, k], the likeliest ids at each place, likeliest first.
    top_logps: float32 [T, k].
  """

  logps: np.ndarray
  top_ids: np.ndarray
  top_logps: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
  """One completion: its ids (with the stop token, if one was sampled), and scores of prompt and ids if asked for."""

  ids: list[int]
  finish: Finish
  scores: Scores | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
  """One prompt to complete.

  Attributes:
    keys: uint32 [n, 2], a raw key for each completion.
    limit: most new tokens; 0 only scores the prompt.
    stop: texts at which a completion may end early; what follows them is for the caller to cut off.
    heard: is told the ids of the n completions so far, on the engine's thread.
    gone: set by the caller when nobody waits any longer.
  """

  served: Served
  prompt: Sequence[int]
  keys: np.ndarray
  limit: int
  temperature: float = 1.0
  top_p: float = 1.0
  scored: bool = False
  stop: Sequence[str] = ()
  heard: Callable[[list[list[int]]], None] | None = None
  gone: threading.Event = dataclasses.field(default_factory=threading.Event)
  done: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)

  @property
  def shape(self) -> tuple:
    """Jobs with one shape can run together."""
    sizes = bucket(len(self.prompt), _STEP), bucket(max(1, self.limit), 8), _power(len(self.keys))
    return self.served.id, *sizes, self.limit > 0, self.temperature, self.top_p


@dataclasses.dataclass(frozen=True, eq=False)
class EmbedJob:
  """Texts to turn into vectors of length 1, float32 [n, D]; `gone` as in `Job`."""

  served: Served
  texts: Sequence[str]
  gone: threading.Event = dataclasses.field(default_factory=threading.Event)
  done: concurrent.futures.Future = dataclasses.field(default_factory=concurrent.futures.Future)


class Engine:
  """A bounded queue and the thread that works it off.

  Args:
    served: the models by id.
    queue: jobs that may wait, beside those that run.
    batch: most prompts of one batch.
    dtype: of the computation.
    token_budget: most padded tokens of one batch.
  """

  def __init__(
    self,
    served: Mapping[str, Served],
    *,
    queue: int = 256,
    batch: int = 16,
    dtype: str = "float32",
    token_budget: int = 32768,
  ):
    self.served, self.queue, self.batch = dict(served), queue, batch
    self._dtype, self._token_budget = dtype, token_budget
    self._waiting: list[Job | EmbedJob] = []
    self._changed = threading.Condition()
    self._stopped = False
    self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
    self._thread.start()

  @property
  def waiting(self) -> int:
    return len(self._waiting)

  def submit(self, jobs: Sequence[Job | EmbedJob]) -> None:
    """Takes all of the jobs or none. Raises Full or Stopped."""
    with self._changed:
      if self._stopped:
        raise Stopped("the server is stopping")
      # Those that nobody waits for any longer take no place.
      self._waiting = [job for job in self._waiting if not job.done.cancelled()]
      if len(self._waiting) + len(jobs) > self.queue:
        raise Full(f"{len(self._waiting)} of at most {self.queue} prompts are waiting")
      self._waiting += jobs
      self._changed.notify()

  def stop(self) -> None:
    """Ends after the batch that runs; jobs that wait get Stopped."""
    with self._changed:
      self._stopped = True
      self._changed.notify()
    self._thread.join()

  def _work(self) -> None:
    while (jobs := self._next()) is not None:
      try:
        results: list = [_embedded(jobs[0])] if isinstance(jobs[0], EmbedJob) else self._complete(jobs)
      except Exception as error:  # whatever it is, the next batch must not wait for it
        logging.getLogger(__name__).exception("a batch failed")
        for job in jobs:
          job.done.set_exception(error)
      else:
        for job, result in zip(jobs, results, strict=True):
          job.done.set_result(result)

  def _next(self) -> list | None:
    """Waits for jobs; the oldest and those behind it that can run with it, or None at the end."""
    with self._changed:
      while True:
        self._changed.wait_for(lambda: self._waiting or self._stopped)
        if self._stopped:
          for job in self._waiting:
            if job.done.set_running_or_notify_cancel():
              job.done.set_exception(Stopped("the server is stopping"))
          self._waiting = []
          return None
        chosen = self._together()
        self._waiting = [job for job in self._waiting if job not in chosen]
        live = [job for job in chosen if job.done.set_running_or_notify_cancel()]
        if live:
          return live

  def _together(self) -> list:
    first = self._waiting[0]
    if isinstance(first, EmbedJob):
      return [first]
    prompt, new, rows = first.shape[1:4]
    most = max(1, min(self.batch, self._token_budget // (prompt + rows * new)))
    positions = first.served.model.config.max_positions
    chosen, longest, limit = [first], len(first.prompt), first.limit
    for job in self._waiting[1:]:
      if len(chosen) == most:
        break
      if isinstance(job, Job) and job.shape == first.shape:
        both = max(longest, len(job.prompt)), max(limit, job.limit)
        if sum(both) <= positions:
          chosen.append(job)
          longest, limit = both
    return chosen

  def _complete(self, jobs: Sequence[Job]) -> list[list[Reply]]:
    model = jobs[0].served.model
    replies = self._sample(model, jobs) if jobs[0].limit else [[Reply([], Finish.LENGTH)] * len(j.keys) for j in jobs]
    rows = [(j, i) for j, job in enumerate(jobs) if job.scored for i in range(len(job.keys))]
    scores = score(model, [[*jobs[j].prompt, *replies[j][i].ids] for j, i in rows], self._dtype, self._token_budget)
    for (j, i), found in zip(rows, scores, strict=True):
      replies[j][i] = dataclasses.replace(replies[j][i], scores=found)
    return replies

  def _sample(self, model: LanguageModel, jobs: Sequence[Job]) -> list[list[Reply]]:
    size = next(size for size in _sizes(self.batch) if size >= len(jobs))
    rows = _power(max(len(job.keys) for job in jobs))
    prompts = [_with_two_tokens(model, job.prompt) for job in jobs]
    missing = size - len(jobs)
    keys = np.zeros((size, rows, 2), np.uint32)
    for j, job in enumerate(jobs):
      keys[j, : len(job.keys)] = job.keys
    sampled = complete(
      model,
      [prompt[:-1] for prompt in prompts] + [prompts[0][:1]] * missing,
      [[prompt[-1:]] * len(job.keys) for prompt, job in zip(prompts, jobs, strict=True)] + [[]] * missing,
      keys,
      Sampling(max(job.limit for job in jobs), jobs[0].temperature, top_p=jobs[0].top_p),
      rows=rows,
      prompt_width=1,
      dtype=self._dtype,
      step=_STEP,
      watch=_watcher(jobs, model.tokenizer) if any(job.stop or job.heard for job in jobs) else None,
    )
    return [
      [_reply(out.ids[: job.limit].tolist(), model.tokenizer.stop_ids) for out in group]
      for job, group in zip(jobs, sampled, strict=False)
    ]


def _watcher(jobs: Sequence[Job], tokenizer: Tokenizer) -> Watch:
  """Tells jobs what was sampled for them, up to the stop token, and ends rows."""

  def watch(told: list[list[np.ndarray]]) -> np.ndarray:
    ended = np.zeros((len(told), max(map(len, told))), bool)
    for j, (job, group) in enumerate(zip(jobs, told, strict=False)):
      said = [[id for id in ids[: job.limit].tolist() if id not in tokenizer.stop_ids] for ids in group]
      if job.heard is not None and not job.gone.is_set():
        job.heard(said)
      for i, ids in enumerate(said):
        ended[j, i] = job.gone.is_set() or len(ids) == job.limit
        if job.stop and not ended[j, i]:
          data = b"".join(tokenizer.pieces(ids))
          ended[j, i] = any(text.encode() in data for text in job.stop)
    return ended

  return watch


def _reply(ids: list[int], stop_ids: Sequence[int]) -> Reply:
  return Reply(ids, Finish.STOP if ids and ids[-1] in stop_ids else Finish.LENGTH)


def _with_two_tokens(model: LanguageModel, prompt: Sequence[int]) -> list[int]:
  """The layout needs a token before the last one: a prompt of a single token is read after the end of a text."""
  return [model.tokenizer.stop_ids[-1], *prompt] if len(prompt) == 1 else list(prompt)


def _sizes(most: int) -> list[int]:
  """Numbers of prompts that a batch is padded to: 1, 4, 16, … and the most."""
  return [*(4**i for i in range(most.bit_length()) if 4**i < most), most]


def _power(count: int) -> int:
  return 1 << (count - 1).bit_length()


def _embedded(job: EmbedJob) -> np.ndarray:
  vectors = job.served.embed(job.texts)
  return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def score(
  model: LanguageModel, sequences: Sequence[Sequence[int]], dtype: str = "float32", token_budget: int = 32768
) -> list[Scores]:
  """Log-probabilities of whole sequences of ids, and the likeliest ids at every place, at temperature 1."""
  found: list[Scores] = [_nothing(model, len(ids)) for ids in sequences]
  order = sorted((i for i, ids in enumerate(sequences) if len(ids) > 1), key=lambda i: len(sequences[i]))
  while order:
    rows = _SCORED_ROWS if _SCORED_ROWS * bucket(len(sequences[order[-1]])) <= token_budget else 1
    part, order = order[:rows], order[rows:]
    batch, _ = pack_whole([sequences[i] for i in part], rows)
    scored = _score(model.config, _alternatives(model), jnp.dtype(dtype).name, model.params, batch)
    logps, top_ids, top_logps = map(np.asarray, scored)
    for row, i in enumerate(part):
      length = len(sequences[i])
      found[i].logps[1:] = logps[: length - 1, row]
      found[i].top_ids[1:] = top_ids[: length - 1, row]
      found[i].top_logps[1:] = top_logps[: length - 1, row]
  return found


def _alternatives(model: LanguageModel) -> int:
  return min(ALTERNATIVES, model.config.vocab_size)


def _nothing(model: LanguageModel, length: int) -> Scores:
  wide = (length, _alternatives(model))
  return Scores(np.full(length, np.nan, np.float32), np.zeros(wide, np.int32), np.full(wide, np.nan, np.float32))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _score(config, k, dtype, params, batch):
  """For each column t: log-probability of id t + 1 [T, rows], and the k likeliest ids [T, rows, k] with theirs."""
  states = decoder.hidden(config, params, batch, dtype=jnp.dtype(dtype))[0]
  targets = jnp.roll(batch.suffix[0], -1, axis=-1)

  def column(at):
    state, target = at
    logp = jax.nn.log_softmax(decoder.logits(params, state))
    top_logps, top_ids = jax.lax.top_k(logp, k)
    return jnp.take_along_axis(logp, target[:, None], axis=-1)[:, 0], top_ids, top_logps

  return jax.lax.map(column, (states.swapaxes(0, 1), targets.swapaxes(0, 1)))
