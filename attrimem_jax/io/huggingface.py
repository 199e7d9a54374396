"""Hugging Face folders to parameters and back.

One table names every tensor, and both directions use it. Reading is strict: a tensor that is missing, not used, of
another shape or of a quantised type is an error that names it, because a model that loads with half of its weights
random still talks. Writing gives a folder that transformers loads as the same model; `verify` proves it.
"""

import dataclasses
import functools
import json
import math
import operator
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer, read_json

# Our name → (the file's name, number of input axes of ours). A file keeps a matrix as [outputs, inputs] with the head
# axes merged; 0 marks vectors, and the embedding, which a lookup reads as it is.
TOP_KEYS = {"embed": ("model.embed_tokens.weight", 0), "norm": ("model.norm.weight", 0), "head": ("lm_head.weight", 1)}
LAYER_KEYS = {
  "attention_norm": ("input_layernorm.weight", 0),
  "q": ("self_attn.q_proj.weight", 1),
  "k": ("self_attn.k_proj.weight", 1),
  "v": ("self_attn.v_proj.weight", 1),
  "o": ("self_attn.o_proj.weight", 2),
  "q_norm": ("self_attn.q_norm.weight", 0),
  "k_norm": ("self_attn.k_norm.weight", 0),
  "q_bias": ("self_attn.q_proj.bias", 0),
  "k_bias": ("self_attn.k_proj.bias", 0),
  "v_bias": ("self_attn.v_proj.bias", 0),
  "mlp_norm": ("post_attention_layernorm.weight", 0),
  "gate": ("mlp.gate_proj.weight", 1),
  "up": ("mlp.up_proj.weight", 1),
  "down": ("mlp.down_proj.weight", 1),
}
DTYPES = ("float32", "bfloat16", "float16")
_READABLE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_SHARD_BYTES = 4 << 30


@dataclasses.dataclass(frozen=True)
class Slot:
  """Where a tensor of a file lives in our parameters: path, layer (None outside of the stack), shapes on both sides."""

  name: str
  path: tuple[str, ...]
  layer: int | None
  inputs: int
  shape: tuple[int, ...]

  @property
  def file_shape(self) -> tuple[int, ...]:
    if self.inputs:
      return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])
    return self.shape if self.path == ("embed",) else (math.prod(self.shape),)

  def from_file(self, array: np.ndarray) -> np.ndarray:
    return (array.T if self.inputs else array).reshape(self.shape)

  def to_file(self, array: np.ndarray) -> np.ndarray:
    # safetensors writes the buffer as it lies and ignores strides, so a transposed view would be stored scrambled.
    turned = array.reshape(self.file_shape[::-1]).T if self.inputs else array.reshape(self.file_shape)
    return np.ascontiguousarray(turned)


@functools.cache
def _shapes(config: DecoderConfig) -> decoder.Params:
  """Our tree of shapes; tracing it takes a while, and every direction needs it."""
  return decoder.abstract(config)


def slots(config: DecoderConfig) -> Iterator[Slot]:
  """Every tensor that a file of this model holds, in the file's order."""
  tree = _shapes(config)
  for key in ("embed", "norm", "head"):
    if key in tree:
      yield Slot(TOP_KEYS[key][0], (key,), None, TOP_KEYS[key][1], tree[key].shape)
  for layer in range(config.layers):
    for key, leaf in tree["layers"].items():
      name, inputs = LAYER_KEYS[key]
      yield Slot(f"model.layers.{layer}.{name}", ("layers", key), layer, inputs, leaf.shape[1:])


def assemble(config: DecoderConfig, tensors: Mapping[str, Callable[[], np.ndarray]], source: str) -> decoder.Params:
  """Fills our tree, float32 on the host, from thunks that each give one tensor as the file has it.

  Raises:
    ValueError: names the tensors that are missing, unknown or of another shape.
  """
  if config.layers > len(tensors):  # before a tree of that many layers is built
    raise ValueError(f"{source} holds {len(tensors)} tensors, but its config.json asks for {config.layers} layers")
  wanted = {slot.name: slot for slot in slots(config)}
  _require_names(wanted.keys(), tensors.keys(), config, source)
  try:
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, np.float32), _shapes(config))
  except (MemoryError, ValueError):
    raise ValueError(f"no memory holds a model of the sizes in config.json of {source}; correct them") from None
  for slot in wanted.values():
    array = np.asarray(tensors[slot.name]())
    if array.shape != slot.file_shape:
      raise ValueError(
        f"tensor {slot.name} of {source} has shape {array.shape}, but its config.json asks for {slot.file_shape}; "
        "weights and configuration are of different models"
      )
    target = _at(params, slot.path)
    target[... if slot.layer is None else slot.layer] = slot.from_file(array)
  if "lm_head.weight" in tensors and config.tied:
    _require_equal_head(params["embed"], tensors["lm_head.weight"](), source)
  return params


def read_config(folder: str | pathlib.Path) -> DecoderConfig:
  """Reads and checks `config.json` alone. Raises ValueError naming the key that this decoder does not compute."""
  path = pathlib.Path(folder) / "config.json"
  if not path.is_file():
    raise ValueError(f"no config.json in {folder}; give a folder that transformers' save_pretrained wrote")
  content = read_json(path)
  try:
    return DecoderConfig.from_hf(content)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def read(folder: str | pathlib.Path) -> tuple[DecoderConfig, decoder.Params]:
  """Reads a Hugging Face folder into (config, float32 parameters on the host).

  Raises:
    ValueError: says which file, key or tensor is missing, unknown, mis-shaped or not supported.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder)
  tensors: dict[str, Callable[[], np.ndarray]] = {}
  for path in weight_files(folder):
    try:
      file = safetensors.safe_open(path, "numpy")
    except (safetensors.SafetensorError, OSError, ValueError) as error:
      raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from None
    for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
      if _full_name(name) in tensors:
        raise ValueError(f"tensor {name} of {path} stands twice in {folder}; remove the weights of the other model")
      tensors[_full_name(name)] = _thunk(file, name, path)
  return config, assemble(config, tensors, str(folder))


def weight_files(folder: str | pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files of a folder: one, or the shards of its index. Raises ValueError where one is missing."""
  folder = pathlib.Path(folder)
  index = folder / "model.safetensors.index.json"
  names = {"model.safetensors"}
  if index.is_file():
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
      raise ValueError(f"{index} has no weight_map from tensors to files; download it again")
    names = set(shards.values())
  missing = sorted(name for name in names if not (folder / name).is_file())
  if missing:
    raise ValueError(
      f"{folder} lacks {', '.join(missing)}; download the model again, or convert it with transformers' "
      "save_pretrained (only safetensors files are read)"
    )
  return sorted(folder / name for name in names)


def write(
  folder: str | pathlib.Path,
  config: DecoderConfig,
  params: decoder.Params,
  tokenizer: Tokenizer,
  source_config: Mapping[str, Any] | None = None,
  *,
  dtype: str = "float32",
) -> None:
  """Writes weights, config.json, tokenizer and generation_config.json, each put in place once it is complete.

  Rows of the vocabulary beyond the model's own are padding and are cut: beyond `source_config["vocab_size"]` where the
  model came from a folder, beyond the tokenizer's vocabulary otherwise. A tied model gets no `lm_head`.

  Args:
    folder: made if need be; an earlier export in it is replaced, other files stay.
    source_config: the dict of the config.json that the model came from, whose other keys are kept.
    dtype: of the stored weights: float32, bfloat16 or float16.

  Raises:
    ValueError: an unknown dtype, or a vocabulary smaller than the tokenizer's.
  """
  if dtype not in DTYPES:
    raise ValueError(f"export dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
  rows = (source_config or {}).get("vocab_size", tokenizer.vocab_size)
  if config.vocab_size < rows:
    raise ValueError(
      f"the model has {config.vocab_size} rows for a vocabulary of {rows} ids of {tokenizer.source}; "
      "export it with the tokenizer that it was trained with"
    )
  config, params = cut_vocabulary(config, params, rows)
  folder = pathlib.Path(folder)
  staging = folder / ".partial"
  shutil.rmtree(staging, ignore_errors=True)
  staging.mkdir(parents=True)
  _write_weights(staging, config, params, dtype)
  tokenizer.save(staging)
  content = dict(source_config or {}) | config.to_hf() | {"torch_dtype": dtype, "eos_token_id": tokenizer.stop_ids[0]}
  for stale in ("dtype", "quantization_config", "transformers_version", "_name_or_path", "rope_scaling"):
    content.pop(stale, None)
  (staging / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
  _move_in(staging, folder)


def cut_vocabulary(config: DecoderConfig, params: decoder.Params, rows: int) -> tuple[DecoderConfig, decoder.Params]:
  """The same model with the first `rows` ids of its vocabulary."""
  cut = params | {"embed": params["embed"][:rows]}
  if "head" in params:
    cut["head"] = params["head"][:, :rows]
  return dataclasses.replace(config, vocab_size=rows), cut


@dataclasses.dataclass(frozen=True)
class Verified:
  """What `verify` measured: largest differences of weights (after rounding to the file's dtype) and of logits.

  `logits` is None where torch is not installed; it is relative to the largest logit, or absolute if that is below 1.
  """

  weights: float
  logits: float | None


def verify(folder: str | pathlib.Path, params: decoder.Params, *, tolerance: float = 1e-4) -> Verified:
  """Reads an export again and compares it with the parameters it was made of, and its logits with torch transformers'.

  Raises:
    ValueError: a weight is not what it should be, or a logit differs by more than `tolerance`.
  """
  config, again = read(folder)
  stored = read_json(pathlib.Path(folder) / "config.json").get("torch_dtype")
  if stored not in DTYPES:
    raise ValueError(f"torch_dtype in config.json of {folder} is {stored!r}; use one of {', '.join(DTYPES)}")
  _, expected = cut_vocabulary(config, params, config.vocab_size)
  expected = jax.tree.map(lambda a: np.asarray(a, jnp.dtype(stored)).astype(np.float32), expected)
  gap = float(np.max(jax.tree.leaves(jax.tree.map(lambda a, b: np.max(np.abs(a - b)), expected, again))))
  if not gap == 0:  # also where the weights are NaN
    raise ValueError(f"the weights in {folder} differ from the model's by {gap}; export it again")
  difference = _logit_difference(folder, config, again)
  if difference is not None and not difference <= tolerance:
    raise ValueError(f"transformers computes logits from {folder} that differ by {difference:.2e} (over {tolerance})")
  return Verified(gap, difference)


def logits(config: DecoderConfig, params: decoder.Params, ids: list[int]) -> jax.Array:
  """float32 logits [T - 1, V] that follow ids[1], ids[2], … of one sequence of at least two."""
  batch = pack([ids[:1]], [[(ids[1:], [])]], prefix_width=1, prompt_width=len(ids) - 1, completion_width=0)
  states = jax.jit(decoder.hidden, static_argnums=0)(config, params, batch)
  return decoder.logits(params, states[0, 0])


def _logit_difference(folder: str | pathlib.Path, config: DecoderConfig, params: decoder.Params) -> float | None:
  try:
    import torch
    import transformers
  except ImportError:
    return None
  ids = np.random.default_rng(0).integers(0, config.vocab_size, 24).tolist()
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    theirs = model(torch.tensor([ids])).logits[0, 1:].numpy()
  ours = np.asarray(logits(config, params, ids))
  return float(np.max(np.abs(ours - theirs)) / max(1.0, np.max(np.abs(theirs))))


def _at(params: Any, path: tuple[str, ...]) -> Any:
  return functools.reduce(operator.getitem, path, params)


def _full_name(name: str) -> str:
  """Embedding models (Qwen3-Embedding) are saved without the head's wrapper, so their names lack `model.`."""
  return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _thunk(file: Any, name: str, path: pathlib.Path) -> Callable[[], np.ndarray]:
  dtype = file.get_slice(name).get_dtype()
  if dtype not in _READABLE:
    raise ValueError(
      f"tensor {name} of {path} is {dtype}; only {', '.join(_READABLE)} are read: use the unquantised model"
    )
  return lambda: file.get_tensor(name)


def _require_names(wanted: Any, given: Any, config: DecoderConfig, source: str) -> None:
  missing = sorted(wanted - given)
  # Old Llama files carry the rotary table, tied ones often a copy of the embedding.
  ignored = {"lm_head.weight"} if config.tied else set()
  unused = sorted(name for name in given - wanted - ignored if not name.endswith("rotary_emb.inv_freq"))
  problems = [f"missing: {_few(missing)}"] * bool(missing) + [f"not used: {_few(unused)}"] * bool(unused)
  if problems:
    raise ValueError(f"tensors of {source} do not fit its config.json ({config.family}); {'; '.join(problems)}")


def _few(names: list[str]) -> str:
  return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_equal_head(embed: np.ndarray, head: np.ndarray, source: str) -> None:
  if head.shape != embed.shape or not np.array_equal(head.astype(np.float32), embed):
    raise ValueError(
      f"config.json of {source} says tie_word_embeddings, but its lm_head.weight differs from the embedding; "
      "set tie_word_embeddings to false if the head is meant to be used"
    )


def _write_weights(folder: pathlib.Path, config: DecoderConfig, params: decoder.Params, dtype: str) -> None:
  """One file, or shards of about 4 GiB with an index; never more than one shard is held beside the parameters."""
  kind = jnp.dtype(dtype)
  shards = _shards(config, kind.itemsize)
  names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
  names = ["model.safetensors"] if len(shards) == 1 else names
  params = jax.device_get(params)
  for name, shard in zip(names, shards, strict=True):
    tensors = {slot.name: slot.to_file(_leaf(params, slot)).astype(kind) for slot in shard}
    safetensors.numpy.save_file(tensors, folder / name, metadata={"format": "pt"})
    (folder / name).chmod(0o644)  # the library makes it readable for its owner alone
  if len(shards) > 1:
    index = {slot.name: name for name, shard in zip(names, shards, strict=True) for slot in shard}
    total = sum(math.prod(slot.shape) for slot in slots(config)) * kind.itemsize
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _shards(config: DecoderConfig, itemsize: int) -> list[list[Slot]]:
  shards: list[list[Slot]] = [[]]
  size = 0
  for slot in slots(config):
    size += math.prod(slot.shape) * itemsize
    if shards[-1] and size > _SHARD_BYTES:
      shards.append([])
      size = math.prod(slot.shape) * itemsize
    shards[-1].append(slot)
  return shards


def _leaf(params: decoder.Params, slot: Slot) -> np.ndarray:
  leaf = _at(params, slot.path)
  return np.asarray(leaf if slot.layer is None else leaf[slot.layer])


def _move_in(staging: pathlib.Path, folder: pathlib.Path) -> None:
  """Replaces an earlier export; config.json comes last, so that a folder which has one is whole."""
  for stale in [folder / "config.json", *folder.glob("model*.safetensors*"), folder / "chat_template.jinja"]:
    stale.unlink(missing_ok=True)
  mode = (staging / "config.json").stat().st_mode  # safetensors makes files that only their owner can read
  for path in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
    path.chmod(mode)
    path.replace(folder / path.name)
  staging.rmdir()
