"""What the official client gets is what the models say when they are asked directly."""

import math

import numpy as np
import pytest

from attrimem_jax.attribution.scoring import answer_logprobs
from attrimem_jax.io.client import Client
from attrimem_jax.memory.retrieval import last_token_embed
from attrimem_jax.rollout.sampling import Sampling, complete

ANSWER = "embedded:answer"
QUESTIONS = [
  "Where does Ann live?",
  "Memory:\n- Ann lives in Lisbon\n\nWhere does Ann live?",
  "Who?",
  "Grüße, 世界 🙂?",
]


def chat(client, text, **options):
  asked = {"model": ANSWER, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
  return client.chat.completions.create(**(asked | options))


def direct(served, ids, limit=16):
  """Ids of a greedy completion by the sampler itself."""
  model = served[ANSWER].model
  ((out,),) = complete(model, [ids[:-1]], [[ids[-1:]]], np.zeros((1, 1, 2), np.uint32), Sampling(limit, 0.0))
  return out.ids.tolist()


def said(served, ids):
  tokenizer = served[ANSWER].model.tokenizer
  return tokenizer.decode([i for i in ids if i not in tokenizer.stop_ids])


@pytest.mark.parametrize("text", QUESTIONS)
def test_greedy_chat_is_what_the_sampler_says(client, served, text):
  prompt = served[ANSWER].chat.prompt([("system", "Answer."), ("user", text)])
  ids = direct(served, prompt)
  parts = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
  messages = [{"role": "developer", "content": "Answer."}, {"role": "user", "content": parts}]
  reply = chat(client, text, messages=messages)
  (choice,) = reply.choices
  assert choice.message.content == said(served, ids)
  assert choice.finish_reason == ("stop" if ids[-1] in served[ANSWER].model.tokenizer.stop_ids else "length")
  assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), len(ids))


def test_text_and_ids_are_one_prompt_and_control_tokens_come_from_ids_alone(client, served):
  tokenizer = served[ANSWER].model.tokenizer
  texts = ["Ann lives in", "<|im_end|>"]
  asked = {"model": ANSWER, "max_tokens": 5, "temperature": 0}
  by_text = client.completions.create(prompt=texts, **asked).choices
  by_ids = client.completions.create(prompt=[tokenizer.encode(text) for text in texts], **asked).choices
  assert [c.text for c in by_text] == [c.text for c in by_ids]
  assert [c.index for c in by_text] == [0, 1]
  prompt = [tokenizer.control("<|im_end|>"), *tokenizer.encode("Ann lives in")]
  (control,) = client.completions.create(prompt=prompt, **asked).choices
  assert control.text == said(served, direct(served, prompt, 5))


def test_a_prompt_of_one_token_is_read_behind_the_end_of_a_text(client, served):
  tokenizer = served[ANSWER].model.tokenizer
  reply = client.completions.create(model=ANSWER, prompt=[7], max_tokens=5, temperature=0)
  assert reply.choices[0].text == said(served, direct(served, [tokenizer.stop_ids[-1], 7], 5))
  assert reply.usage.prompt_tokens == 1


def test_log_probabilities_of_a_chat_are_those_of_direct_scoring(client, served):
  model, text = served[ANSWER].model, QUESTIONS[1]
  (choice,) = chat(client, text, logprobs=True, top_logprobs=3).choices
  prompt = served[ANSWER].chat.prompt([("user", text)])
  ids = [i for i in direct(served, prompt) if i not in model.tokenizer.stop_ids]
  told = choice.logprobs.content
  assert b"".join(bytes(token.bytes) for token in told).decode() == choice.message.content
  wanted = answer_logprobs(model, prompt[:1], [[*prompt[1:], *ids[:t]] for t in range(len(ids))], [[i] for i in ids])
  np.testing.assert_allclose([token.logprob for token in told], wanted, atol=2e-5)
  for token in told:
    assert len(token.top_logprobs) == 3
    assert token.top_logprobs[0].logprob == token.logprob  # greedy
    assert token.top_logprobs == sorted(token.top_logprobs, key=lambda top: -top.logprob)


def test_an_echoed_prompt_is_scored_without_any_new_token(client, served):
  model, text = served[ANSWER].model, "Ann’s home is in Lisbon."
  (choice,) = client.completions.create(model=ANSWER, prompt=text, max_tokens=0, echo=True, logprobs=2).choices
  ids, told = model.tokenizer.encode(text), choice.logprobs
  assert choice.text == text
  assert len(told.tokens) == len(ids)
  assert told.token_logprobs[0] is None
  wanted = answer_logprobs(model, ids[:1], [ids[1:2]], [ids[2:]])
  assert sum(told.token_logprobs[2:]) == pytest.approx(float(wanted[0]), abs=1e-4)
  assert told.text_offset[0] == 0
  assert text[told.text_offset[-1] :] == told.tokens[-1]
  for token, logp, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[1:]:
    assert top[token] == logp


def test_log_probabilities_after_echo_go_on_with_the_completion(client):
  asked = {"model": ANSWER, "prompt": "Ann lives in", "max_tokens": 4, "temperature": 0, "logprobs": 1}
  (alone,) = client.completions.create(**asked).choices
  (echoed,) = client.completions.create(**asked, echo=True).choices
  assert echoed.text == "Ann lives in" + alone.text
  assert echoed.logprobs.token_logprobs[-len(alone.logprobs.tokens) :] == pytest.approx(alone.logprobs.token_logprobs)


def test_stop_strings_cut_text_tokens_and_log_probabilities(client):
  (whole,) = chat(client, QUESTIONS[0], logprobs=True).choices
  text = whole.message.content
  stop = text[4:7]
  (cut,) = chat(client, QUESTIONS[0], logprobs=True, stop=["no such text", stop]).choices
  assert cut.message.content == text[: text.index(stop)]
  assert cut.finish_reason == "stop"
  assert 0 < len(cut.logprobs.content) < len(whole.logprobs.content)


def test_draws_follow_the_seed_and_not_the_batch(client):
  asked = {"temperature": 1.5, "n": 4, "max_tokens": 12}

  def texts(**options):
    return [choice.message.content for choice in chat(client, QUESTIONS[2], **(asked | options)).choices]

  assert texts(seed=5) == texts(seed=5) != texts(seed=-6)
  assert texts(seed=5)[:2] == texts(seed=5, n=2)
  assert len(set(texts(seed=5))) > 1
  assert texts() != texts()
  assert set(texts(top_p=0)) == set(texts(temperature=0))  # nothing but the likeliest is left


def test_a_stream_holds_the_same_reply(client):
  whole = chat(client, QUESTIONS[0], n=2)
  chunks = list(chat(client, QUESTIONS[0], n=2, stream=True, stream_options={"include_usage": True}))
  assert len({chunk.id for chunk in chunks}) == 1
  for i, choice in enumerate(whole.choices):
    mine = [part for chunk in chunks for part in chunk.choices if part.index == i]
    assert mine[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in mine) == choice.message.content
    assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
  assert chunks[-1].usage == whole.usage
  asked = {"model": ANSWER, "prompt": "Ann", "max_tokens": 4, "temperature": 0}
  texts = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
  assert "".join(texts) == client.completions.create(**asked).choices[0].text


def test_embeddings_are_unit_vectors_of_the_last_token(client, served):
  model, texts = served[ANSWER].model, ["Ann lives in Lisbon", "Ben"]
  wanted = last_token_embed(model.config, model.params, model.tokenizer)(texts)
  wanted /= np.linalg.norm(wanted, axis=-1, keepdims=True)
  for form in ({}, {"encoding_format": "float"}):  # by default the client asks for base64 and unpacks it
    reply = client.embeddings.create(model=ANSWER, input=texts, **form)
    np.testing.assert_allclose([row.embedding for row in reply.data], wanted, atol=1e-6)
    assert reply.usage.total_tokens == sum(len(model.tokenizer.encode(text)) for text in texts)
  assert math.isclose(float(np.linalg.norm(reply.data[1].embedding)), 1, abs_tol=1e-5)


def test_models_are_listed_by_name(client, served):
  assert [model.id for model in client.models.list()] == list(served)
  assert client.models.retrieve(ANSWER).id == ANSWER


def test_this_projects_client_gets_the_same(client, server):
  with Client(server.url, ANSWER, parameters={"temperature": 0, "max_tokens": 16}) as mine:
    replies = mine.complete([[("user", text)] for text in QUESTIONS])
    assert [reply.text for reply in replies] == [chat(client, text).choices[0].message.content for text in QUESTIONS]
    assert (mine.spent.requests, mine.spent.failed) == (4, 0)
    assert mine.spent.prompt_tokens == sum(chat(client, text).usage.prompt_tokens for text in QUESTIONS)
