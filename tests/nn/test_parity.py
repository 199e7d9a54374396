"""The decoder computes what torch transformers computes: tiny random models of every family, and SmolLM2 where it is.

transformers makes and saves the model, so that neither the weights nor their names come from this project.
"""

import os
import pathlib

import jax
import numpy as np
import pytest

from attrimem_jax.io import huggingface, models
from attrimem_jax.nn import batching, decoder
from attrimem_jax.nn.lora import TARGETS, Lora

torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'attrimem-jax[parity]')")
transformers = pytest.importorskip("transformers")

SIZES = {
  "vocab_size": 97,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5,
  "initializer_range": 0.2,
}
HEAD = {"head_dim": 12}
CASES = {
  "qwen3 tied": ("Qwen3", HEAD | {"tie_word_embeddings": True, "rope_theta": 1e6}),
  "qwen3 untied": ("Qwen3", HEAD | {"tie_word_embeddings": False, "rope_theta": 5e6}),
  "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
  "qwen2 untied": ("Qwen2", {"tie_word_embeddings": False, "rope_theta": 1e6}),
  "llama tied": ("Llama", {"tie_word_embeddings": True, "rope_theta": 1e5}),
  "llama untied": ("Llama", HEAD | {"tie_word_embeddings": False}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def folder(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
  family, options = request.param
  torch.manual_seed(0)
  model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SIZES, **options))
  with torch.no_grad():  # norms start at one and biases at zero: a reader that skipped them would pass
    for parameter in model.parameters():
      if parameter.ndim == 1:
        parameter.add_(0.3 * torch.randn_like(parameter))
  model.save_pretrained(tmp_path)
  return tmp_path


def reference_logits(folder: pathlib.Path, ids: list[int]) -> np.ndarray:
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    return model(torch.tensor([ids])).logits[0].numpy()


def test_logits_of_tiny_models(folder: pathlib.Path):
  config, params = huggingface.read(folder)
  ids = np.random.default_rng(0).integers(0, config.vocab_size, 40).tolist()
  expected = reference_logits(folder, ids)[1:]
  assert np.max(np.abs(expected)) > 1
  np.testing.assert_allclose(huggingface.logits(config, params, ids), expected, rtol=0, atol=1e-4)


def test_token_logprobs_on_the_shared_layout(folder: pathlib.Path):
  """Two prefixes with suffixes of several lengths: each row equals a plain pass over its concatenation."""
  config, params = huggingface.read(folder)
  draw = np.random.default_rng(1)
  prefixes = [draw.integers(0, 97, n).tolist() for n in (5, 11)]
  suffixes = [[(draw.integers(0, 97, a).tolist(), draw.integers(0, 97, b).tolist()) for a, b in ((3, 7), (6, 2))]] * 2
  batch = batching.pack(prefixes, suffixes, completion_width=8)
  logp, _ = decoder.token_logprobs(config, params, batch, 8)
  for p, prefix in enumerate(prefixes):
    for i, (prompt, completion) in enumerate(suffixes[p]):
      ids = prefix + prompt + completion
      z = torch.log_softmax(torch.tensor(reference_logits(folder, ids)), -1).numpy()
      expected = z[np.arange(len(ids) - len(completion) - 1, len(ids) - 1), completion]
      np.testing.assert_allclose(logp[p, i, : len(completion)], expected, rtol=0, atol=1e-4)
      assert not np.any(logp[p, i, len(completion) :])


@pytest.mark.slow
def test_logits_of_smollm2():
  name = "smollm2-135m-instruct"
  if not models.is_local(name):
    pytest.skip(f"{name} is not on this machine; run `python -m attrimem_jax.io.models {name}` to fetch it")
  folder = models.resolve(name)
  config, params = huggingface.read(folder)
  ids = models.load_tokenizer(name).encode("The parrot 🦜 said 12 words:\n\n日本語 and then def f(x): return x")
  expected = reference_logits(folder, ids)[1:]
  np.testing.assert_allclose(huggingface.logits(config, params, ids), expected, rtol=0, atol=1e-4 * np.max(expected))
  assert os.path.isdir(folder)


def test_logits_with_low_rank_factors_are_those_of_peft(folder: pathlib.Path):
  peft = pytest.importorskip("peft", reason="peft is not installed (pip install peft)")
  lora = Lora(3, 7.0, tuple(TARGETS))
  names = {key: name.removesuffix(".weight").split(".")[-1] for key, (name, _) in huggingface.LAYER_KEYS.items()}
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  model = peft.get_peft_model(
    model, peft.LoraConfig(r=3, lora_alpha=7.0, lora_dropout=0.0, target_modules=[names[key] for key in TARGETS])
  )
  config, params = huggingface.read(folder)
  rng = np.random.default_rng(5)
  factors = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), lora.abstract(config))
  for number, layer in enumerate(model.base_model.model.model.layers):
    for key in TARGETS:
      module = getattr(layer.self_attn if key in "qkvo" else layer.mlp, names[key])
      a, b = (factors["layers"][f"{key}_lora_{side}"][number] for side in "ab")
      module.lora_A["default"].weight.data = torch.tensor(a.reshape(-1, 3).T.copy())
      module.lora_B["default"].weight.data = torch.tensor(b.reshape(3, -1).T.copy())
  ids = rng.integers(0, config.vocab_size, 40).tolist()
  with torch.no_grad():
    expected = model(torch.tensor([ids])).logits[0, 1:].numpy()
  plain = huggingface.logits(config, params, ids)
  found = huggingface.logits(config, lora.join(params, factors), ids)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
  assert np.max(np.abs(found - plain)) > 0.1
  np.testing.assert_allclose(
    huggingface.logits(config, lora.merge(params, factors), ids), found, rtol=0, atol=1e-5 * np.max(np.abs(found))
  )
