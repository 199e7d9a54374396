"""GGUF files of every supported architecture are read as the model they were written from, tokenizer included."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

from attrimem_jax.io import gguf, huggingface
from attrimem_jax.io import models as language_models
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import byte_alphabet

writer_package = pytest.importorskip("gguf", reason="gguf is not installed (pip install 'attrimem-jax[gguf]')")

MERGES = ["Ġ t", "h e", "Ġt he", "Ċ Ċ"]
TOKENS = [*("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"), *byte_alphabet()]
TOKENS += [*(merge.replace(" ", "") for merge in MERGES), "[PAD264]"]
TYPES = [3, 3, 3, 4] + [1] * (256 + len(MERGES)) + [5]
VOCABULARY = len(TOKENS)


def pair(rows: np.ndarray, heads: int) -> np.ndarray:
  """What llama.cpp's converter does to q and k of a Llama: row j of a half head and its partner become neighbours."""
  halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
  return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def write(
  path: pathlib.Path,
  config: DecoderConfig,
  params: decoder.Params,
  *,
  words: str = "qwen2",
  quantised: str = "F32",
  fields: Callable | None = None,
) -> None:
  """A GGUF file made with the format's own package; `fields` may change the metadata."""
  writer = writer_package.GGUFWriter(path, config.family)
  writer.add_block_count(config.layers)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.hidden)
  writer.add_head_count(config.heads)
  writer.add_head_count_kv(config.kv_heads)
  writer.add_key_length(config.head_size)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(words)
  writer.add_token_list(TOKENS)
  writer.add_token_types(TYPES)
  writer.add_token_merges(MERGES)
  writer.add_eos_token_id(2)
  writer.add_pad_token_id(0)
  writer.add_chat_template("{{ '<|im_start|>' }}")
  if fields:
    fields(writer)
  kind = writer_package.GGMLQuantizationType[quantised]
  names = {f"{hf}": name for name, hf in gguf.LAYER_NAMES.items()} | {hf: name for name, hf in gguf.TOP_NAMES.items()}
  for slot in huggingface.slots(config):
    leaf = params[slot.path[0]] if slot.layer is None else params["layers"][slot.path[1]][slot.layer]
    array = slot.to_file(np.asarray(leaf))
    _, _, rest = slot.name.partition("model.layers.")
    number, _, rest = rest.partition(".")
    base, _, ending = rest.rpartition(".")
    name = f"blk.{number}.{names[base]}.{ending}" if number else names[slot.name]
    if config.family == "llama" and slot.path[-1] in ("q", "k"):
      array = pair(array, config.heads if slot.path[-1] == "q" else config.kv_heads)
    if array.ndim == 2 and quantised != "F32":
      writer.add_tensor(name, writer_package.quants.quantize(array, kind), raw_dtype=kind)
    else:
      writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def small(family: str, **changes) -> tuple[DecoderConfig, decoder.Params]:
  switches = {"qk_norm": family == "qwen3", "qkv_bias": family == "qwen2"}
  sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "hidden": 64}
  rest = {"vocab_size": VOCABULARY, "rope_theta": 5e4, "norm_eps": 1e-5, "max_positions": 64, "family": family}
  config = DecoderConfig(**(sizes | switches | rest | changes))
  draw = np.random.default_rng(0)
  shapes = decoder.abstract(config)
  return config, jax.tree.map(lambda leaf: draw.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


def equal(a: dict, b: dict) -> bool:
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_written_and_read_is_the_same(family: str, tied: bool, tmp_path: pathlib.Path):
  config, params = small(family, tied=tied)
  write(tmp_path / "m.gguf", config, params)
  again_config, again, tokenizer = gguf.read(tmp_path / "m.gguf")
  assert again_config == config
  assert equal(again, params)
  assert tokenizer.decode(tokenizer.encode("the parrot")) == "the parrot"


def test_the_order_of_rotary_rows_by_hand():
  """One head of size 4: the file has rows 0, 2, 1, 3 (each with its partner half a head further on)."""
  rows = np.array([[0.0], [2.0], [1.0], [3.0]])
  assert gguf.unpair(rows, 1).ravel().tolist() == [0, 1, 2, 3]
  assert gguf.unpair(np.concatenate([rows, rows + 4]), 2).ravel().tolist() == list(range(8))


@pytest.mark.parametrize(("quantised", "error"), [("Q8_0", 0.01), ("Q4_1", 0.15), ("F16", 1e-3), ("BF16", 1e-2)])
def test_quantised_weights_are_close(quantised: str, error: float, tmp_path: pathlib.Path):
  config, params = small("llama")
  write(tmp_path / "m.gguf", config, params, quantised=quantised)
  again = gguf.read(tmp_path / "m.gguf")[1]
  gaps = jax.tree.leaves(jax.tree.map(lambda a, b: np.max(np.abs(a - b)), params, again))
  assert 0 < max(gaps) < error


def test_a_quantisation_that_cannot_be_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  write(tmp_path / "m.gguf", *small("llama"), quantised="Q8_0")

  def refuse(*_):
    raise NotImplementedError

  monkeypatch.setattr("gguf.quants.dequantize", refuse)
  with pytest.raises(ValueError, match=r"token_embd\.weight.*Q8_0, which cannot be read"):
    gguf.read(tmp_path / "m.gguf")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda writer: writer.add_sliding_window(512), "use_sliding_window"),
    (lambda writer: writer.add_rope_scaling_type(writer_package.RopeScalingType.YARN), "yarn"),
    (lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((2, 2), np.float32)), "ffn_gate_exps"),
    (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32)), r"rope_freqs\.weight"),
  ],
)
def test_what_the_decoder_does_not_compute_is_refused(change: Callable, message: str, tmp_path: pathlib.Path):
  write(tmp_path / "m.gguf", *small("llama"), fields=change)
  with pytest.raises(ValueError, match=message):
    gguf.read(tmp_path / "m.gguf")


def test_other_architectures_and_tokenizers(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"m\.gguf lacks metadata"):
    gguf.config_of({"general.architecture": "clip"}, {}, "m.gguf")
  write(tmp_path / "m.gguf", *small("llama"), words="llama-bpe")
  with pytest.raises(ValueError, match=r"'llama-bpe'.*'smollm', 'qwen2'"):
    gguf.read_tokenizer(tmp_path / "m.gguf")
  with pytest.raises(ValueError, match="'spm'"):
    gguf.tokenizer_of({"tokenizer.ggml.model": "spm"}, "m.gguf")


def test_files_that_are_no_gguf(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match="no GGUF file"):
    gguf.read(tmp_path / "m.gguf")
  (tmp_path / "m.gguf").write_bytes(b"something else entirely, and long enough to be a header")
  with pytest.raises(ValueError, match="not a whole GGUF file"):
    gguf.read(tmp_path / "m.gguf")
  write(tmp_path / "whole.gguf", *small("llama"))
  whole = (tmp_path / "whole.gguf").read_bytes()
  (tmp_path / "m.gguf").write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ValueError, match="not a whole GGUF file"):
    gguf.read(tmp_path / "m.gguf")


def test_missing_and_damaged_metadata(tmp_path: pathlib.Path):
  write(tmp_path / "m.gguf", *small("llama"))
  fields, tensors = gguf._open(tmp_path / "m.gguf")
  for key in [key for key in fields if key.endswith(("count", "length", "epsilon"))]:
    if not key.endswith(("head_count_kv", "key_length")):  # these two have defaults
      with pytest.raises(ValueError, match=rf"m\.gguf lacks metadata .*{key}"):
        gguf.config_of({name: value for name, value in fields.items() if name != key}, tensors, "m.gguf")
    for value in (-1, "x", [4, 4]):
      with pytest.raises(ValueError, match=r"m\.gguf"):
        gguf.config_of(fields | {key: value}, tensors, "m.gguf")
  for key in ("tokens", "token_type", "merges"):
    name = f"tokenizer.ggml.{key}"
    for damaged in ({k: v for k, v in fields.items() if k != name}, fields | {name: [3]}, fields | {name: "x"}):
      with pytest.raises(ValueError, match=r"the tokenizer of m\.gguf is damaged"):
        gguf.tokenizer_of(damaged, "m.gguf")
  with pytest.raises(ValueError, match=r"the tokenizer of m\.gguf is damaged"):
    gguf.tokenizer_of(fields | {"tokenizer.ggml.eos_token_id": 10**6}, "m.gguf")


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.1, 0.3, 0.9, 0.999])
def test_cut_files(share: float, tmp_path: pathlib.Path):
  write(tmp_path / "m.gguf", *small("llama"))
  whole = (tmp_path / "m.gguf").read_bytes()
  (tmp_path / "m.gguf").write_bytes(whole[: int(len(whole) * share)])
  with pytest.raises(ValueError, match=r"m\.gguf is not a whole GGUF file"):
    gguf.read(tmp_path / "m.gguf")


def test_tokenizer_of_the_metadata(tmp_path: pathlib.Path):
  write(tmp_path / "m.gguf", *small("qwen2"))
  tokenizer = gguf.read_tokenizer(tmp_path / "m.gguf")
  assert tokenizer.control_ids == {0, 1, 2, 3}
  assert (tokenizer.stop_ids, tokenizer.pad_id) == ((2,), 0)
  assert tokenizer.vocab_size == VOCABULARY - 1  # the unused id at the end is padding
  assert tokenizer.encode(" the\n\n") == [TOKENS.index("Ġthe"), TOKENS.index("ĊĊ")]
  assert tokenizer.chat_template == "{{ '<|im_start|>' }}"


def test_transformers_gives_the_same_ids(tmp_path: pathlib.Path):
  """Control tokens stand at the start of this vocabulary, as in SmolLM2: their ids must survive."""
  transformers = pytest.importorskip("transformers")
  write(tmp_path / "m.gguf", *small("llama"), words="smollm")
  tokenizer = gguf.read_tokenizer(tmp_path / "m.gguf")
  tokenizer.save(tmp_path / "saved")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
  for text in ("the 123 parrots\n\n", "I love 🦜", "def f(x):\n\treturn x"):
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
  assert theirs("<|im_start|>the<think>")["input_ids"] == [1, *tokenizer.encode("the"), 3]


def test_a_gguf_becomes_a_folder(tmp_path: pathlib.Path):
  config, params = small("llama")
  write(tmp_path / "m.gguf", config, params, words="smollm")
  model = language_models.load(str(tmp_path / "m.gguf"))
  language_models.check(str(tmp_path / "m.gguf"))
  huggingface.write(tmp_path / "folder", model.config, model.params, model.tokenizer)
  again = language_models.load(str(tmp_path / "folder"))
  assert again.config.vocab_size == VOCABULARY - 1
  assert np.array_equal(again.params["layers"]["q"], params["layers"]["q"])
  assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
  assert again.tokenizer.encode("the 12 parrots") == model.tokenizer.encode("the 12 parrots")
