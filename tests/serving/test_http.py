"""The endpoint's edges: streams of whole characters, bad requests, limits, clients that go, and a stop that loses none.

Where it matters when something is said, a scripted sampler says it: it waits until the test lets it go on.
"""

import concurrent.futures
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time

import hypothesis
import numpy as np
import openai
import pytest
from hypothesis import strategies as st

from attrimem_jax.rollout.sampling import Completion, Sampling, complete
from attrimem_jax.serving import engine as engines
from attrimem_jax.serving import replies, requests
from attrimem_jax.serving.engine import Reply
from attrimem_jax.serving.http import Limits
from attrimem_jax.types import Finish

ANSWER = "embedded:answer"
HELLO = {"model": ANSWER, "messages": [{"role": "user", "content": "Hello?"}]}


class Script:
  """Stands for `sampling.complete`: every row says `text`, one token a look; before each look `gate` must be open."""

  def __init__(self, text):
    self.text, self.gate, self.begun, self.ended = text, threading.Semaphore(0), threading.Semaphore(0), []

  def __call__(self, model, prefixes, prompts, keys, sampling, *, watch=None, **_):
    self.begun.release()
    ids = np.array([*model.tokenizer.encode(self.text), model.tokenizer.stop_ids[0]])[: sampling.max_new_tokens]
    for t in range(1, len(ids)):
      assert self.gate.acquire(timeout=60)
      ended = watch([[ids[:t]] * len(group) for group in prompts]) if watch else np.zeros((1, 1), bool)
      if ended[0, 0]:
        ids = ids[:t]
        break
    self.ended.append(len(ids))
    return [[Completion(ids, np.zeros(len(ids)), Finish.STOP)] * len(group) for group in prompts]


@pytest.fixture
def script(monkeypatch):
  def make(text, open=True):
    found = Script(text)
    if open:
      found.gate.release(1000)
    monkeypatch.setattr(engines, "complete", found)
    return found

  return make


def heard(chunks):
  return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]


def test_a_stream_tells_text_before_the_rest_is_sampled(client, script):
  said = script("one two three", open=False)
  said.gate.release(2)
  stream = client.chat.completions.create(**HELLO, stream=True)
  assert next(stream).choices[0].delta.role == "assistant"
  first = next(stream).choices[0].delta.content
  assert "one two three".startswith(first)
  assert not said.ended
  said.gate.release(1000)
  assert first + "".join(heard(stream)) == "one two three"


@pytest.mark.parametrize("text", ["Grüße aus 東京 🙂👩‍👩‍👧 – naïve", "𝒳𝒴 👍🏽"])
def test_characters_of_several_tokens_are_told_whole(client, served, script, text):
  script(text)
  assert len(served[ANSWER].model.tokenizer.encode(text)) > len(text.split())
  parts = heard(client.chat.completions.create(**HELLO, stream=True))
  assert "".join(parts) == text
  assert len(parts) > 2
  assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_stop_text_across_tokens_is_never_told_and_ends_the_row(client, script):
  said = script("It is in Lisbon, and then in Porto")
  parts = heard(client.chat.completions.create(**HELLO, stream=True, stop=["bon, and", "zzz"]))
  assert "".join(parts) == "It is in Lis"
  assert said.ended[0] < len(said.text.split()) * 4
  whole = client.chat.completions.create(**HELLO, stop=["bon, and"])
  assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("It is in Lis", "stop")
  assert said.ended[0] == said.ended[1]  # also where nobody streams


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
  ids=st.lists(st.integers(0, 600), max_size=12),
  stop=st.lists(st.text("ab e", min_size=1, max_size=3), max_size=2),
  echo=st.booleans(),
)
def test_what_a_stream_tells_is_the_whole_reply(served, ids, stop, echo):
  """Ids may be any bytes, also such as are no characters; reference: the reply that is told at once."""
  ids = [i for i in ids if i not in served[ANSWER].model.tokenizer.stop_ids]
  body = {"model": ANSWER, "prompt": [5, 300], "stop": stop or None, "echo": echo, "stream": True}
  asked = requests.completions(served, body, 64)
  told = replies.choices(asked, [[Reply(ids, Finish.LENGTH)]])
  stream = replies.Stream({}, asked, chat=False)
  chunks = [chunk for t in range(len(ids) + 1) for chunk in stream.hear(0, [ids[:t]])] + list(stream.end(told))
  assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == told[0].text


def test_a_stream_of_log_probabilities_tells_them_at_its_end(client):
  asked = HELLO | {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
  chunks = list(client.chat.completions.create(**asked, stream=True))
  found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
  (whole,) = client.chat.completions.create(**asked).choices
  assert [log.model_dump() for log in found] == [whole.logprobs.model_dump()]
  assert "".join(heard(chunks)) == whole.message.content


def test_an_error_within_a_stream_is_an_event(client, script, monkeypatch):
  said = script("one two three four")

  def fail(*_):
    raise RuntimeError("a bug")

  monkeypatch.setattr(replies, "choices", fail)
  with pytest.raises(openai.APIError, match="its log says why"):
    list(client.chat.completions.create(**HELLO, stream=True))
  assert said.ended


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER = [{"role": "user", "content": "Hi"}]
BAD = [
  (CHAT, b"{", 400, "valid JSON", None),
  (CHAT, b"\xff\xfe", 400, "valid JSON", None),
  (CHAT, b"[" * 100_000, 400, "valid JSON", None),
  (CHAT, b"[]", 400, "send a JSON object", None),
  (CHAT, {"messages": USER}, 400, "name one of embedded:answer", "model"),
  (CHAT, {"model": "gpt", "messages": USER}, 404, "does not exist; there are", "model"),
  (CHAT, {"model": ANSWER}, 400, "give a list of messages", "messages"),
  (CHAT, {"model": ANSWER, "messages": []}, 400, "give a list of messages", "messages"),
  (CHAT, {"model": ANSWER, "messages": ["Hi"]}, 400, "role and content", "messages[0]"),
  (CHAT, {"model": ANSWER, "messages": [{"role": "tool", "content": "x"}]}, 400, "use one of", "messages[0].role"),
  (CHAT, {"model": ANSWER, "messages": [{"role": "user"}]}, 400, "give a text", "messages[0].content"),
  (CHAT, {"model": ANSWER, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts of type",
   "messages[0].content"),
  (CHAT, {"model": ANSWER, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate", "messages"),
  (CHAT, {"model": ANSWER, "messages": USER, "max_tokens": 0}, 400, "whole number, 1", "max_tokens"),
  (CHAT, {"model": ANSWER, "messages": USER, "max_tokens": 65}, 400, "at most 64", "max_tokens"),
  (CHAT, {"model": ANSWER, "messages": USER, "max_tokens": 10**9}, 400, "exceeds the context", "messages"),
  (CHAT, {"model": ANSWER, "messages": USER, "temperature": 3}, 400, "0 to 2", "temperature"),
  (CHAT, {"model": ANSWER, "messages": USER, "temperature": True}, 400, "0 to 2", "temperature"),
  (CHAT, b'{"model": "embedded:answer", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}', 400, "0 to 1",
   "top_p"),
  (CHAT, {"model": ANSWER, "messages": USER, "n": 0}, 400, "1 to 128", "n"),
  (CHAT, {"model": ANSWER, "messages": USER, "n": 1.5}, 400, "1 to 128", "n"),
  (CHAT, {"model": ANSWER, "messages": USER, "seed": "x"}, 400, "whole number", "seed"),
  (CHAT, {"model": ANSWER, "messages": USER, "stop": [""]}, 400, "none empty", "stop"),
  (CHAT, {"model": ANSWER, "messages": USER, "stop": ["a"] * 5}, 400, "at most 4", "stop"),
  (CHAT, {"model": ANSWER, "messages": USER, "stream": "yes"}, 400, "true or false", "stream"),
  (CHAT, {"model": ANSWER, "messages": USER, "top_logprobs": 2}, 400, "needs logprobs", "top_logprobs"),
  (CHAT, {"model": ANSWER, "messages": USER, "logprobs": True, "top_logprobs": 21}, 400, "0 to 20", "top_logprobs"),
  (CHAT, {"model": ANSWER, "messages": USER, "tools": [{"type": "function"}]}, 400, "not supported", "tools"),
  (CHAT, {"model": ANSWER, "messages": USER, "presence_penalty": 1}, 400, "not supported", "presence_penalty"),
  (CHAT, {"model": ANSWER, "messages": USER, "temprature": 1}, 400, "no field of this request", "temprature"),
  (CHAT, {"model": ANSWER, "messages": [{"role": "user", "content": "word " * 3000}]}, 400, "exceeds the context",
   "messages"),
  (COMPLETIONS, {"model": ANSWER}, 400, "give a text", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": ""}, 400, "at least one token", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": [1, "a"]}, 400, "list of ids", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": [10**6]}, 400, "holds an id that is not one", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": [-1]}, 400, "holds an id that is not one", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": ["a"] * 129}, 400, "at most 128", "prompt"),
  (COMPLETIONS, {"model": ANSWER, "prompt": ["a"] * 20}, 400, "only 8 may wait", None),
  (COMPLETIONS, {"model": ANSWER, "prompt": "a", "logprobs": True}, 400, "0 to 20", "logprobs"),
  (COMPLETIONS, {"model": ANSWER, "prompt": "a", "best_of": 3}, 400, "not supported", "best_of"),
  (EMBEDDINGS, {"model": ANSWER, "input": []}, 400, "none empty", "input"),
  (EMBEDDINGS, {"model": ANSWER, "input": [1, 2]}, 400, "not ids", "input"),
  (EMBEDDINGS, {"model": ANSWER, "input": "word " * 3000}, 400, "exceeds the context", "input"),
  (EMBEDDINGS, {"model": ANSWER, "input": "a", "dimensions": 7}, 400, "cannot be shortened", "dimensions"),
  (EMBEDDINGS, {"model": ANSWER, "input": "a", "encoding_format": "hex"}, 400, "float or base64", "encoding_format"),
  (CHAT, b" " * 200_000, 413, "larger than 100000 bytes", None),
  ("/v1/nothing", {}, 404, "Not Found", None),
]  # fmt: skip


@pytest.fixture(scope="module")
def strict(serve, served):
  limits = Limits(new_tokens=64, body=100_000, timeout=60)
  with serve(served, limits, key="secret-key", queue=8) as found:
    yield found


def post(server, path, body, key="secret-key", method="POST"):
  """(status, headers, object) of a request as bytes, without a client that would check them."""
  connection = http.client.HTTPConnection(*server.url.split("/")[2].split(":"), timeout=30)
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  connection.request(method, path, data, {"Authorization": f"Bearer {key}"})
  answer = connection.getresponse()
  found = answer.status, answer.headers, json.loads(answer.read())
  connection.close()
  return found


@pytest.mark.parametrize(("path", "body", "status", "what", "param"), BAD)
def test_what_is_wrong_with_a_request_is_said(strict, path, body, status, what, param):
  got, _, said = post(strict, path, body)
  assert (got, said["error"]["param"]) == (status, param), said
  assert what in said["error"]["message"]
  assert set(said["error"]) == {"message", "type", "param", "code"}


def test_only_the_key_opens(strict):
  for key in ("", "wrong", "secret-key2", "s\u00e9cret"):
    status, _, said = post(strict, CHAT, HELLO, key=key)
    assert (status, said["error"]["code"]) == (401, "invalid_api_key")
  with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
    strict.client().models.list()
  status, headers, said = post(strict, CHAT, {}, method="GET")
  assert (status, headers["Allow"]) == (405, "POST")
  assert "Method Not Allowed" in said["error"]["message"]
  assert strict.client(api_key="secret-key").models.list().data


def test_beyond_the_queue_requests_are_refused_and_those_within_are_answered(serve, served, script):
  said = script("fine", open=False)
  with serve(served, queue=3, batch=1) as server, server.client() as client:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      running = pool.submit(client.chat.completions.create, **HELLO)
      assert said.begun.acquire(timeout=60)
      waiting = [pool.submit(client.chat.completions.create, **HELLO) for _ in range(3)]
      until(lambda: server.engine.waiting == 3)
      for path in (CHAT, CHAT, COMPLETIONS):
        status, headers, refused = post(server, path, HELLO if path == CHAT else {"model": ANSWER, "prompt": "a"})
        assert (status, headers["Retry-After"], refused["error"]["code"]) == (429, "1", "queue_full")
      said.gate.release(1000)
      assert {f.result(60).choices[0].message.content for f in (running, *waiting)} == {"fine"}
    with server.client().with_options(max_retries=2) as patient:
      assert patient.chat.completions.create(**HELLO).choices


def test_clients_that_go_take_their_requests_with_them(serve, served, script):
  said = script("one two three four five six", open=False)
  with serve(served, batch=1) as server, server.client() as client:
    said.gate.release(2)
    stream = client.chat.completions.create(**HELLO, stream=True)
    next(stream)
    impatient = client.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
      impatient.chat.completions.create(**HELLO)  # waits in the queue
    stream.close()
    until(lambda: server.endpoint.open == 0)
    said.gate.release(1000)
    assert client.chat.completions.create(**HELLO).choices[0].message.content == said.text
    assert len(said.ended) == 2  # that of the impatient never began
    assert said.ended[0] < said.ended[1]


def test_what_takes_too_long_is_answered_so(serve, served, script):
  said = script("late", open=False)
  with serve(served, Limits(timeout=0.3)) as server, server.client() as client:
    with pytest.raises(openai.InternalServerError, match=r"longer than 0.3 s") as found:
      client.chat.completions.create(**HELLO)
    assert found.value.status_code == 504
    connection = http.client.HTTPConnection(*server.url.split("/")[2].split(":"), timeout=30)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Length", "100")
    connection.endheaders(b"{")
    assert connection.getresponse().status == 408
    connection.close()
    said.gate.release(1000)


def test_a_batch_that_fails_is_an_error_and_the_next_one_runs(client, script, monkeypatch):
  def fail(*_, **__):
    raise RuntimeError("out of memory")

  monkeypatch.setattr(engines, "complete", fail)
  with pytest.raises(openai.InternalServerError, match="its log says why"):
    client.chat.completions.create(**HELLO)
  with pytest.raises(openai.InternalServerError, match="its log says why"):
    client.chat.completions.create(**HELLO, stream=True)
  script("again")
  assert client.chat.completions.create(**HELLO).choices[0].message.content == "again"


@pytest.fixture(scope="module")
def process(repository):
  """The job itself, in a process of its own."""
  command = [sys.executable, "-m", "attrimem_jax.main", f"--config={repository / 'configs' / 'serve.py'}"]
  command += ["--config.serve.port=0", "--config.serve.models=('embedded:answer',)", "--config.serve.grace=60"]
  command += ["--config.serve.queue=64"]
  environment = os.environ | {"ATTRIMEM_API_KEY": "process-key", "JAX_PLATFORMS": "cpu"}
  child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  killer = threading.Timer(300, child.kill)
  killer.start()
  yield child
  killer.cancel()
  child.kill()
  child.wait()


@pytest.fixture(scope="module")
def listening(process):
  """The line that tells where the process listens, and how to connect."""
  line = process.stdout.readline()
  return line, {"base_url": line.split()[2].rstrip(","), "api_key": "process-key", "max_retries": 0, "timeout": 100}


def test_two_hundred_at_once_are_answered_as_alone_or_refused(listening, served):
  """Three times as many as may wait. References: the sampler itself, one prompt at a time."""
  model = served[ANSWER].model
  prompts = [f"{name} lives in" for name in ("Ann", "Ben", "Cleo", "Dora", "Gina")]
  wanted = {}
  for prompt in prompts:
    ids = model.tokenizer.encode(prompt)
    ((out,),) = complete(model, [ids[:-1]], [[ids[-1:]]], np.zeros((1, 1, 2), np.uint32), Sampling(8, 0.0), step=128)
    wanted[prompt] = model.tokenizer.decode([i for i in out.ids.tolist() if i not in model.tokenizer.stop_ids])
  open_ = prompts * 40
  assert len(open_) == 200
  with openai.OpenAI(**listening[1]) as client, concurrent.futures.ThreadPoolExecutor(200) as pool:

    def ask(prompt):
      try:
        return client.completions.create(model=ANSWER, prompt=prompt, max_tokens=8, temperature=0).choices[0].text
      except openai.RateLimitError:
        return None

    rounds = 0
    while open_ and rounds < 50:
      rounds += 1
      said = list(pool.map(ask, open_))
      assert all(text in (None, wanted[prompt]) for prompt, text in zip(open_, said, strict=True))
      open_ = [prompt for prompt, text in zip(open_, said, strict=True) if text is None]
  assert not open_


def test_sigterm_finishes_what_was_taken_and_takes_nothing_new(process, listening):
  line, options = listening
  asked = {"model": ANSWER, "prompt": "Ann lives in", "max_tokens": 40, "temperature": 1.5}
  with openai.OpenAI(**options) as client, concurrent.futures.ThreadPoolExecutor(6) as pool:
    pending = [pool.submit(client.completions.create, **asked, seed=seed) for seed in range(6)]
    health = options["base_url"].removesuffix("/v1") + "/health"
    until(lambda: not all(f.done() for f in pending) and client.get(health, cast_to=object)["open"] >= 6)
    process.send_signal(signal.SIGTERM)
    assert "stopping: 6 requests" in process.stdout.readline()
    with pytest.raises(openai.APIError):
      client.completions.create(**asked)
    assert all(f.result(100).usage.completion_tokens > 0 for f in pending)
  rest, errors = process.communicate(timeout=60)
  assert (process.returncode, rest.strip()) == (0, "stopped")
  assert "process-key" not in line + rest + errors


def until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it never came true"
    time.sleep(0.02)
