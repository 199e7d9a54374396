"""The client against a scripted endpoint that answers, fails, talks nonsense and breaks off."""

import collections
import json
import logging
import re
import threading

import pytest

from attrimem_jax.io import client as clients
from attrimem_jax.io.client import Client, Reply, Spent
from tests.endpoint import reply


def asks(*texts):
  return [[("user", text)] for text in texts]


def test_replies_come_in_the_order_of_the_requests_and_are_counted(endpoint):
  how = {"temperature": 0, "max_tokens": 5, "reasoning": {"effort": "low"}}
  with Client(endpoint.url, "m", concurrency=5, prices=(2.0, 10.0), parameters=how) as client:
    texts = [f"text {i}" for i in range(30)]
    assert client.complete(asks(*texts))[7] == Reply("TEXT 7", "stop", 7, 3)
    assert client.texts(asks(*texts)) == [text.upper() for text in texts]
    assert client.spent == Spent(60, 0, 0, 420, 180, pytest.approx((420 * 2 + 180 * 10) / 1e6))
  assert {"model": "m", "messages": [{"role": "user", "content": "text 0"}], **how} in endpoint.seen


def test_no_more_requests_are_under_way_than_allowed(endpoint):
  now, most, both = 0, 0, threading.Barrier(2)

  def script(body, number):
    nonlocal now, most
    with endpoint.lock:
      now += 1
      most = max(most, now)
    both.wait(60)  # two at a time, or this fails
    with endpoint.lock:
      now -= 1
    return "x"

  endpoint.script = script
  with Client(endpoint.url, "m", concurrency=2) as client:
    assert client.texts(asks(*"abcdef")) == ["x"] * 6
  assert most == 2


@pytest.mark.parametrize("failure", [(500, b"{}"), (429, b"{}"), (503, b"busy"), None])
def test_what_may_pass_is_tried_again(endpoint, failure):
  endpoint.script = lambda body, number: failure if number < 3 else "at last"
  with Client(endpoint.url, "m", retries=2) as client:
    assert client.texts(asks("a")) == ["at last"]
  assert len(endpoint.seen) == 3


@pytest.mark.parametrize(
  ("said", "error"),
  [
    ((500, b'{"error": {"message": "out of memory"}}'), "InternalServerError.*out of memory"),
    ((400, b'{"error": {"message": "no such model"}}'), "BadRequestError.*no such model"),
    (None, "APIConnectionError: Connection error.*disconnected"),
    ((200, b"<html>Welcome</html>"), "JSONDecodeError|sent no completion"),
    ((200, b"{}"), "sent no completion"),
    ((200, b"[1]"), "sent no completion"),
    ((200, b"null"), "sent no completion"),
    ((200, b'{"choices": []}'), "sent no completion"),
    ((200, b'{"choices": {"a": 1}}'), "sent no completion"),
    ((200, b'{"choices": "abc"}'), "sent no completion"),
    ((200, b'{"choices": [{"message": null}]}'), "sent no completion"),
    ((200, b'{"choices": [{"message": {"content": null}, "finish_reason": "length"}]}'), "no text.*'length'"),
    ((200, b'{"choices": [{"message": {"content": 7}, "finish_reason": 1}]}'), "no text, but 7"),
  ],
)
def test_a_request_that_fails_is_a_reply_with_an_error_beside_those_that_do_not(endpoint, said, error):
  endpoint.script = lambda body, number: said if body["messages"][0]["content"] == "bad" else "good"
  with Client(endpoint.url, "m", retries=0, concurrency=1) as client:
    first, failed, last = client.complete(asks("a", "bad", "b"))
    assert (first.text, last.text) == ("good", "good")
    assert failed.text == ""
    assert re.search(error, failed.error), failed.error
    assert client.spent.failed == 1


def test_counts_that_are_none_are_zero(endpoint):
  odd = {**reply("x"), "usage": {"prompt_tokens": "many", "completion_tokens": -3}}
  endpoint.script = lambda body, number: (200, json.dumps(odd).encode())
  with Client(endpoint.url, "m") as client:
    assert client.complete(asks("a")) == [Reply("x", "stop")]
    assert client.spent == Spent(1, 0, 0, 0, 0, None)


def test_an_endpoint_that_refuses_all_is_given_up(endpoint):
  endpoint.script = lambda body, number: (401, b'{"error": {"message": "wrong key"}}')
  refused = pytest.raises(ValueError, match=r"the last 2\d requests to http.*wrong key")
  with Client(endpoint.url, "m", concurrency=4) as client, refused:
    client.complete(asks(*map(str, range(500))))
  assert len(endpoint.seen) < 40


def test_no_such_host_and_no_such_scheme_are_said():
  for url, error in (("http://no.such.host.invalid/v1", "APIConnectionError"), ("127.0.0.1/v1", "protocol")):
    with Client(url, "m", retries=0) as client:
      (failed,) = client.complete(asks("a"))
      assert error in failed.error


def test_the_key_comes_from_the_variable_that_is_named_and_is_shown_nowhere(endpoint, monkeypatch, tmp_path, caplog):
  monkeypatch.setenv("MY_KEY", "top-secret")
  monkeypatch.setenv("OPENAI_API_KEY", "not-asked-for")
  endpoint.script = lambda body, number: (400, b'{"error": {"message": "the key top-secret is not known here"}}')
  caplog.set_level(logging.DEBUG)
  with Client(endpoint.url, "m", key="MY_KEY", cache=tmp_path / "c.jsonl") as client:
    (failed,) = client.complete(asks("a"))
    assert "the key <key> is not known" in failed.error
    endpoint.script = lambda body, number: "fine"
    client.complete(asks("a"))
    assert "top-secret" not in repr(client) + caplog.text + (tmp_path / "c.jsonl").read_text(encoding="utf-8")
  with Client(endpoint.url, "m") as client:
    client.complete(asks("a"))
  assert [headers["Authorization"] for headers in endpoint.headers] == ["Bearer top-secret"] * 2 + ["Bearer none"]
  monkeypatch.delenv("MY_KEY")
  with pytest.raises(ValueError, match=r"\$MY_KEY is not set: put the API key"):
    Client(endpoint.url, "m", key="MY_KEY")


def test_the_cache_answers_what_was_asked_before_and_only_that(endpoint, tmp_path):
  path = tmp_path / "deep" / "replies.jsonl"
  endpoint.script = lambda body, number: f"{body['messages'][0]['content']} {number} \u2028 🙂"

  def ask(*texts, **parameters):
    with Client(endpoint.url, "m", cache=path, concurrency=1, parameters=parameters) as client:
      return client.texts(asks(*texts)), client.spent

  first, spent = ask("a", "b", "a")
  assert spent == Spent(3, 0, 0, 21, 9, None)
  assert len(set(first)) == 3  # the second "a" was asked as well
  again, spent = ask("a", "b", "a")
  assert (again, spent) == (first, Spent(3, 3, 0, 21, 9, None))
  assert ask("b", "c")[0][0] == first[1]
  assert len(endpoint.seen) == 4
  ask("a", temperature=1)  # another request
  assert len(endpoint.seen) == 5
  endpoint.script = lambda body, number: (500, b"{}")
  with Client(endpoint.url, "m", cache=path, retries=0) as client:
    client.complete(asks("new"))
  assert len(path.read_text(encoding="utf-8").split("\n")) == 6  # the failure is not kept


def test_a_second_try_of_one_client_is_asked_again(endpoint, tmp_path):
  for tried in range(2):
    with Client(endpoint.url, "m", cache=tmp_path / "c.jsonl") as client:
      assert [client.texts(asks("a")) for _ in range(3)] == [["A"]] * 3
    assert len(endpoint.seen) == 3, tried


def test_a_cut_cache_loses_its_last_line_and_a_damaged_one_is_named(endpoint, tmp_path):
  path = tmp_path / "c.jsonl"
  with Client(endpoint.url, "m", cache=path) as client:
    client.complete(asks("a", "b"))
    with pytest.raises(ValueError, match="another process uses the cache"):
      Client(endpoint.url, "m", cache=path)
  path.write_bytes(path.read_bytes()[:-5])
  with Client(endpoint.url, "m", cache=path) as client:
    assert sorted(reply.cached for reply in client.complete(asks("a", "b"))) == [False, True]
  path.write_bytes(b'{"request": 1}\n' + path.read_bytes())
  with pytest.raises(ValueError, match=r"c.jsonl, line 1: no reply .* remove the line"):
    Client(endpoint.url, "m", cache=path)


def test_bad_arguments_are_refused(endpoint):
  for options, what in (
    ({"url": ""}, "url of Client"),
    ({"model": " "}, "model of Client"),
    ({"concurrency": 0}, "concurrency"),
    ({"timeout": 0}, "timeout"),
    ({"retries": -1}, "retries"),
    ({"prices": (-1, 0)}, "prices"),
    ({"parameters": {"temperature": float("nan")}}, "no JSON"),
    *(({"parameters": {name: 1}}, f"{name} is no parameter") for name in ("model", "messages", "stream", "n")),
  ):
    with pytest.raises(ValueError, match=what):
      Client(**({"url": endpoint.url, "model": "m"} | options))


def test_requests_go_on_after_some_failures(endpoint):
  """Every third fails: never so many in a row that the endpoint is given up."""
  endpoint.script = lambda body, number: "x" if int(body["messages"][0]["content"]) % 3 else (400, b"{}")
  with Client(endpoint.url, "m", concurrency=1) as client:
    found = client.texts(asks(*map(str, range(3 * clients.GIVE_UP))))
  assert collections.Counter(found) == {"x": 40, None: 20}
