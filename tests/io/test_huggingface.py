"""Folders round-trip for every family; whatever does not fit is named; transformers reads what is written."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from attrimem_jax.io import huggingface
from attrimem_jax.nn import decoder
from attrimem_jax.text.tokenizer import Tokenizer

Model = tuple  # (DecoderConfig, Params)


def equal(a: dict, b: dict) -> bool:
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def change_tensors(folder: pathlib.Path, change) -> None:
  tensors = safetensors.numpy.load_file(folder / "model.safetensors")
  change(tensors)
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def change_config(folder: pathlib.Path, **changes) -> None:
  content = json.loads((folder / "config.json").read_text()) | changes
  (folder / "config.json").write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_written_and_read_is_the_same(model: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  config, params = model
  huggingface.write(tmp_path, config, params, tokenizer)
  again_config, again = huggingface.read(tmp_path)
  assert again_config == config
  assert equal(again, params)
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(again))
  assert Tokenizer.load(tmp_path).fingerprint == tokenizer.fingerprint
  assert not (tmp_path / ".partial").exists()


def test_every_parameter_has_a_slot(model: Model):
  """A leaf that the table forgot would neither be written nor asked for."""
  config, params = model
  stored = sum(int(np.prod(slot.shape)) for slot in huggingface.slots(config))
  assert stored == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_tied_models_have_no_head_and_untied_ones_do(model: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  config, params = model
  huggingface.write(tmp_path, config, params, tokenizer)
  names = safetensors.numpy.load_file(tmp_path / "model.safetensors").keys()
  assert ("lm_head.weight" in names) is not config.tied
  assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is config.tied


def test_a_tensor_by_hand(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  config, params = qwen3
  huggingface.write(tmp_path, config, params, tokenizer)
  file = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  q, o = file["model.layers.2.self_attn.q_proj.weight"], file["model.layers.1.self_attn.o_proj.weight"]
  assert q.shape == (config.heads * config.head_size, config.width)
  assert q[1 * config.head_size + 3, 7] == params["layers"]["q"][2, 7, 1, 3]
  assert o[7, 1 * config.head_size + 3] == params["layers"]["o"][1, 1, 3, 7]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_stored_rounded_and_read_as_float32(
  qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, dtype: str
):
  config, params = qwen3
  huggingface.write(tmp_path, config, params, tokenizer, dtype=dtype)
  expected = jax.tree.map(lambda a: a.astype(jnp.dtype(dtype)).astype(np.float32), params)
  assert equal(huggingface.read(tmp_path)[1], expected)
  assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
  assert huggingface.verify(tmp_path, params).weights == 0


def test_vocabulary_padding_is_cut(tokenizer: Tokenizer, qwen3: Model, tmp_path: pathlib.Path):
  """Rows that only fill up the shards (259 to 264) must not reach a reader."""
  config, params = qwen3
  padded = params | {"embed": np.pad(params["embed"], ((0, 5), (0, 0)))}
  huggingface.write(tmp_path, dataclasses.replace(config, vocab_size=264), padded, tokenizer)
  again_config, again = huggingface.read(tmp_path)
  assert again_config == config
  assert equal(again, params)


def test_rows_of_the_source_model_stay(tokenizer: Tokenizer, qwen3: Model, tmp_path: pathlib.Path):
  """Qwen's own files have 151,936 rows for 151,669 ids; a fine-tuned model keeps that shape, and the other keys."""
  config, params = qwen3
  config = dataclasses.replace(config, vocab_size=264)
  params = params | {"embed": np.pad(params["embed"], ((0, 5), (0, 0)))}
  source = config.to_hf() | {"initializer_range": 0.5, "quantization_config": {}, "dtype": "bfloat16"}
  huggingface.write(tmp_path, config, params, tokenizer, source)
  content = json.loads((tmp_path / "config.json").read_text())
  assert content["vocab_size"] == 264
  assert content["initializer_range"] == 0.5
  assert "quantization_config" not in content
  assert "dtype" not in content


def test_vocabulary_smaller_than_the_tokenizers(tokenizer: Tokenizer, qwen3: Model, tmp_path: pathlib.Path):
  config, params = huggingface.cut_vocabulary(*qwen3, 100)
  with pytest.raises(ValueError, match="100 rows for a vocabulary of 259"):
    huggingface.write(tmp_path, config, params, tokenizer)


def test_unknown_dtype(tokenizer: Tokenizer, qwen3: Model, tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"int8.*float32, bfloat16, float16"):
    huggingface.write(tmp_path, *qwen3, tokenizer, dtype="int8")


def test_shards(model: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  config, params = model
  monkeypatch.setattr(huggingface, "_SHARD_BYTES", 20_000)
  huggingface.write(tmp_path, config, params, tokenizer)
  files = huggingface.weight_files(tmp_path)
  assert len(files) > 1
  assert equal(huggingface.read(tmp_path)[1], params)
  files[0].unlink()
  with pytest.raises(ValueError, match=files[0].name):
    huggingface.read(tmp_path)


def test_an_earlier_export_is_replaced_and_other_files_stay(
  model: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
  config, params = model
  (tmp_path / "README.md").write_text("mine")
  with monkeypatch.context() as patch:
    patch.setattr(huggingface, "_SHARD_BYTES", 20_000)
    huggingface.write(tmp_path, config, jax.tree.map(np.zeros_like, params), tokenizer)
  huggingface.write(tmp_path, config, params, tokenizer)
  assert [path.name for path in huggingface.weight_files(tmp_path)] == ["model.safetensors"]
  assert equal(huggingface.read(tmp_path)[1], params)
  assert (tmp_path / "README.md").read_text() == "mine"


def test_missing_unused_and_mis_shaped_tensors_are_named(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  huggingface.write(tmp_path / "whole", *qwen3, tokenizer)
  down = "model.layers.1.mlp.down_proj.weight"

  def broken(name: str, change) -> pathlib.Path:
    shutil.copytree(tmp_path / "whole", tmp_path / name)
    change_tensors(tmp_path / name, change)
    return tmp_path / name

  with pytest.raises(ValueError, match=f"missing: {down}"):
    huggingface.read(broken("missing", lambda tensors: tensors.pop(down)))
  with pytest.raises(ValueError, match=r"not used: model\.layers\.0\.extra"):
    huggingface.read(broken("extra", lambda tensors: tensors.update({"model.layers.0.extra": np.ones(1)})))
  with pytest.raises(ValueError, match=rf"{down}.*\(2, 3\).*\(16, 20\)"):
    huggingface.read(broken("shape", lambda tensors: tensors.update({down: np.ones((2, 3), np.float32)})))
  with pytest.raises(ValueError, match=f"{down}.*I8"):
    huggingface.read(broken("int8", lambda tensors: tensors.update({down: np.ones((16, 20), np.int8)})))


def test_a_copy_of_the_tied_head_is_accepted_and_another_head_is_not(
  qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path
):
  """All tied Qwen3 files but the 4B's carry `lm_head.weight`."""
  config, params = qwen3
  huggingface.write(tmp_path, config, params, tokenizer, dtype="bfloat16")
  embed = np.asarray(params["embed"]).astype(ml_dtypes.bfloat16)
  change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embed}))
  assert "head" not in huggingface.read(tmp_path)[1]
  change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embed + embed}))
  with pytest.raises(ValueError, match="tie_word_embeddings"):
    huggingface.read(tmp_path)


def test_an_untied_model_without_its_head(tokenizer: Tokenizer, qwen3: Model, tmp_path: pathlib.Path):
  huggingface.write(tmp_path, *qwen3, tokenizer)
  change_config(tmp_path, tie_word_embeddings=False)
  with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
    huggingface.read(tmp_path)


def test_names_without_the_models_prefix(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  """Qwen3-Embedding is saved so; old Llama files carry a rotary table too."""
  huggingface.write(tmp_path, *qwen3, tokenizer)
  tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  bare = {name.removeprefix("model."): array for name, array in tensors.items()}
  bare["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
  safetensors.numpy.save_file(bare, tmp_path / "model.safetensors")
  assert equal(huggingface.read(tmp_path)[1], qwen3[1])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "yarn"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ({"attention_bias": True}, "attention_bias"),
    ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"hidden_size": None}, "lacks the key 'hidden_size'"),
    *(
      ({"hidden_size": value}, "config.json: hidden_size of config.json is")
      for value in (0, -1, "16", 1.5, 2**40, [16])
    ),
    ({"num_attention_heads": 0}, "num_attention_heads of config.json is 0: use a whole number, 1"),
    ({"num_attention_heads": 3}, "must be a multiple of kv_heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads of config.json is 0"),
    ({"head_dim": 5}, "must be even"),
    *(({"rms_norm_eps": value}, "0 <= rms_norm_eps") for value in (-1, math.nan, "x")),
    *(({"rope_parameters": {"rope_theta": value}}, "0 < rope_theta") for value in (0, math.nan, math.inf, "x")),
    ({"rope_parameters": [1]}, "rotary parameters are"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings of config.json is 'false': use true or false"),
    ({"model_type": ["qwen3"]}, "is not supported"),
    ({"num_hidden_layers": 10**9}, "tensors, but its config.json asks for 1000000000 layers"),
  ],
)
def test_what_the_decoder_does_not_compute_is_refused(
  qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, changes: dict, message: str
):
  huggingface.write(tmp_path, *qwen3, tokenizer)
  change_config(tmp_path, **changes)
  with pytest.raises(ValueError, match=message):
    huggingface.read(tmp_path)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    *(("config.json", content, "config.json is not valid JSON") for content in (b"", b"{", b"\xff", b"[" * 100_000)),
    *(("config.json", content, "config.json holds a .* instead of an object") for content in (b"[]", b"3", b"null")),
    ("config.json", b"{}", "model_type None is not supported"),
    ("config.json", b'{"model_type": "qwen3"}', "lacks the key 'num_attention_heads'"),
    *(
      ("model.safetensors", content, "model.safetensors is not a whole safetensors file")
      for content in (b"", b"garbage", b"\xff" * 100, None)
    ),
    *(
      ("model.safetensors.index.json", content, "index.json has no weight_map")
      for content in (b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}')
    ),
    ("model.safetensors.index.json", b"[", "index.json is not valid JSON"),
    ("model.safetensors.index.json", b'{"weight_map": {"a": "no.safetensors"}}', "lacks no.safetensors"),
  ],
)
def test_damaged_files_are_named(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, name, content, message):
  huggingface.write(tmp_path, *qwen3, tokenizer)
  whole = (tmp_path / name).read_bytes() if content is None else b""
  (tmp_path / name).write_bytes(whole[:-50] if content is None else content)
  with pytest.raises(ValueError, match=message):
    huggingface.read(tmp_path)


def test_rope_theta_is_found_in_both_places(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  huggingface.write(tmp_path, *qwen3, tokenizer)
  change_config(tmp_path, rope_theta=None)
  assert huggingface.read_config(tmp_path).rope_theta == 5e4
  change_config(tmp_path, rope_theta=7e3, rope_parameters=None)
  assert huggingface.read_config(tmp_path).rope_theta == 7e3


def test_missing_files(tmp_path: pathlib.Path, qwen3: Model, tokenizer: Tokenizer):
  with pytest.raises(ValueError, match=r"no config\.json"):
    huggingface.read(tmp_path)
  huggingface.write(tmp_path, *qwen3, tokenizer)
  (tmp_path / "model.safetensors").unlink()
  with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
    huggingface.read(tmp_path)
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config\.json"):
    huggingface.read(tmp_path)


def test_verify_compares_logits_with_transformers(model: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  config, params = model
  huggingface.write(tmp_path, config, params, tokenizer)
  measured = huggingface.verify(tmp_path, params)
  assert measured.weights == 0
  assert measured.logits <= 1e-4
  loaded = transformers.AutoConfig.from_pretrained(tmp_path)
  assert loaded.architectures == [config.to_hf()["architectures"][0]]
  assert loaded.eos_token_id == tokenizer.stop_ids[0]


@pytest.mark.parametrize("value", [0.5, np.nan])
def test_verify_finds_a_changed_weight(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path, value: float):
  config, params = qwen3
  huggingface.write(tmp_path, config, params, tokenizer)

  def change(tensors: dict) -> None:
    tensors["model.norm.weight"][3] = value

  change_tensors(tmp_path, change)
  with pytest.raises(ValueError, match="differ from the model"):
    huggingface.verify(tmp_path, params)


def test_transformers_reads_tokenizer_and_template(qwen3: Model, tokenizer: Tokenizer, tmp_path: pathlib.Path):
  transformers = pytest.importorskip("transformers")
  huggingface.write(tmp_path, *qwen3, tokenizer)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  text = "I love 🦜\n\n42"
  assert theirs(text)["input_ids"] == tokenizer.encode(text)
  assert theirs.chat_template == tokenizer.chat_template
  assert theirs.eos_token_id == tokenizer.stop_ids[0]


def test_logits_do_not_depend_on_what_follows(qwen3: Model):
  config, params = qwen3
  ids = list(range(10))
  whole, part = huggingface.logits(config, params, ids), huggingface.logits(config, params, ids[:6])
  np.testing.assert_allclose(whole[:5], part, atol=1e-5)
  assert decoder.abstract(config)["norm"].shape == (config.width,)
