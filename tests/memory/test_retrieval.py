"""Rankings by words and by vectors."""

import dataclasses

import jax
import numpy as np
import pytest

from attrimem_jax.memory.retrieval import Bm25, Dense, last_token_embed, recall, words
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.types import Module, Record

CONFIG = DecoderConfig(
  vocab_size=400, width=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, max_positions=64, tied=True
)


@pytest.fixture(scope="module")
def params() -> decoder.Params:
  draw = np.random.default_rng(0).normal
  return jax.tree.map(lambda a: draw(0, 0.3, a.shape).astype(np.float32), decoder.abstract(CONFIG))


def records(*texts: str, module: Module = Module.SEMANTIC) -> list[Record]:
  return [Record(i, module, text, (i,)) for i, text in enumerate(texts, 1)]


def test_words_of_two_scripts():
  assert words("Ann's CAFÉ, 2024-03") == ["ann", "s", "café", "2024", "03"]
  assert words("我住在Porto。すし") == ["我", "住", "在", "porto", "す", "し"]
  assert words("… !") == []


def test_bm25_finds_the_rare_word_first():
  bank = records("Ann likes tea", "Bob likes tea", "Ann lives in Lisbon", "Bob lives in Porto")
  assert Bm25(1).rank("Where does Bob live? In Porto?", bank) == [3]
  assert Bm25(2).rank("tea, Bob", bank) == [1, 0]


def test_bm25_scores_follow_the_formula():
  # Lucene's form: idf = ln(1 + (N - n + .5) / (n + .5)), tf / (tf + 1.5 (.25 + .75 length / mean length)); by hand:
  bank = records("a b", "a a c d", "b b b")
  order = sorted(range(3), key=lambda i: -[1 / (1 + 1.5 * (0.25 + 0.75 * 2 / 3)), 2 / (2 + 1.5 * 1.25), 0.0][i])
  assert Bm25(2).rank("a", bank) == order[:2] == [1, 0]


@pytest.mark.parametrize("retriever", [Bm25(3), Dense(lambda texts: np.ones((len(texts), 2), np.float32), 3)])
def test_few_records_come_back_in_their_order_and_ties_keep_it(retriever):
  assert retriever.rank("x", []) == []
  assert retriever.rank("tea", records("Ann", "tea")) == [0, 1]
  assert retriever.rank("x", records("a", "b", "c", "d", "e")) == [0, 1, 2]
  assert retriever.rank_many([], records("a", "b", "c", "d")) == []


def test_bm25_without_words():
  assert Bm25(1).rank("…", records("tea", "Ann")) == [0]
  assert Bm25(1).rank("tea", records("…", "!")) == [0]
  assert Bm25(1).rank("tea", records("…", "tea")) == [1]
  assert Bm25(1).rank("住", records("我在", "他住")) == [1]


def test_rank_many_equals_rank():
  bank = records(*(f"fact {i} about {i % 3} tea" for i in range(12)))
  queries = ["fact 3", "tea", "about 2", "nothing"]
  assert Bm25(4).rank_many(queries, bank) == [Bm25(4).rank(query, bank) for query in queries]


def test_core_memory_is_always_recalled():
  bank = [
    *records("profile", module=Module.CORE),
    *(dataclasses.replace(r, id=r.id + 1) for r in records("tea", "Ann", "Bob")),
  ]
  ((core, best),) = recall(Bm25(1), ["is Bob here?"], bank)
  assert (core.text, best.text) == ("profile", "Bob")


def test_dense_ranks_by_cosine_reads_records_once_and_puts_the_instruction_before_queries():
  seen: list[str] = []
  vectors = {
    "east": [2, 0],
    "north": [0, 0.1],
    "north-east": [1, 1],
    "nowhere": [0, 0],
    "find: up": [0, 3],
    "find: right": [9, 1],
  }

  def embed(texts):
    seen.extend(texts)
    return np.array([vectors[text] for text in texts], np.float32)

  dense = Dense(embed, 2, instruction="find: ")
  bank = records("east", "north", "north-east", "nowhere")
  assert dense.rank("up", bank) == [1, 2]
  assert dense.rank("right", bank) == [0, 2]
  assert seen == ["east", "north", "north-east", "nowhere", "find: up", "find: right"]


def test_dense_keeps_no_more_vectors_than_it_may():
  calls: list[int] = []

  def embed(texts):
    calls.append(len(texts))
    return np.arange(len(texts) * 2, dtype=np.float32).reshape(-1, 2)

  dense = Dense(embed, 1, cache=2)
  bank = records("a", "b", "c", "d")
  assert dense.rank("x", bank) == dense.rank("x", bank)
  assert calls == [4, 1, 2, 1]


def test_the_vector_of_a_text_does_not_depend_on_what_it_is_read_with(tokenizer, params):
  embed = last_token_embed(CONFIG, params, tokenizer, rows=4)
  texts = ["tea", "Ann lives in Lisbon", "x", "", "Bob " * 5, "t"]
  together = embed(texts)
  assert together.shape == (6, 32)
  assert together.dtype == np.float32
  for i, text in enumerate(texts):
    np.testing.assert_allclose(embed([text])[0], together[i], atol=1e-5)
  assert not together[3].any()
  assert embed([]).shape == (0, 32)


def test_vectors_equal_transformers(tokenizer, params):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  model = transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG.to_hf())).eval()
  _load(torch, model, params)
  embed = last_token_embed(CONFIG, params, tokenizer, end="<|endoftext|>")
  for text in ("tea", "Ann lives in Lisbon", "é🦜"):
    row = torch.tensor([[*tokenizer.encode(text), tokenizer.control("<|endoftext|>")]])
    with torch.no_grad():
      expected = model(row).last_hidden_state[0, -1].numpy()
    np.testing.assert_allclose(embed([text])[0], expected, atol=1e-5)


def _load(torch, model, params) -> None:
  """Copies our parameters into transformers' Qwen3, tensor by tensor."""
  names = {
    "input_layernorm": ("attention_norm", ()),
    "post_attention_layernorm": ("mlp_norm", ()),
    **{f"self_attn.{n}_proj": (n, ("flat",)) for n in "qkvo"},
    **{f"self_attn.{n}_norm": (f"{n}_norm", ()) for n in "qk"},
    **{f"mlp.{n}_proj": (n, ("flat",)) for n in ("gate", "up", "down")},
  }
  state = {"embed_tokens.weight": params["embed"], "norm.weight": params["norm"]}
  for layer in range(CONFIG.layers):
    for theirs, (ours, flat) in names.items():
      value = np.asarray(params["layers"][ours][layer])
      if flat:  # [in..., out...] to [out, in]: o reduces over its first two axes, the others over one
        value = value.reshape(-1, CONFIG.width).T if ours == "o" else value.reshape(value.shape[0], -1).T
      state[f"layers.{layer}.{theirs}.weight"] = value
  model.load_state_dict({name: torch.tensor(np.array(value)) for name, value in state.items()}, strict=True)
