"""Shape never changes the number: the shared layout against a float64 decoder that reads one plain sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attrimem_jax.nn import decoder
from attrimem_jax.nn.batching import pack
from attrimem_jax.nn.config import DecoderConfig
from tests.nn import oracle

CONFIG = oracle.QWEN3
COUNT = 4
PREFIXES = ([5, 9, 0, 31], [7])
SUFFIXES = ([([3, 8], [1, 2, 4]), ([11], [6])], [([2, 0, 50, 13, 4], [9, 9, 0, 20])])


@pytest.fixture(scope="module")
def params() -> decoder.Params:
  return oracle.draw(CONFIG)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("count", "chunk", "dtype", "remat"))
def run(config, params, batch, temperature=1.0, *, count=COUNT, chunk=1024, dtype="float32", remat=False):
  return decoder.token_logprobs(
    config, params, batch, count, temperature=temperature, chunk=chunk, dtype=jnp.dtype(dtype), remat=remat
  )


def packed(prefixes=PREFIXES, suffixes=SUFFIXES, step=8, **widths) -> decoder.Shared:
  return pack(prefixes, suffixes, completion_width=COUNT, step=step, **widths)


def expected(config, params, temperature=1.0, width=COUNT) -> np.ndarray:
  out = np.zeros((len(PREFIXES), max(map(len, SUFFIXES)), width))
  for p, (prefix, group) in enumerate(zip(PREFIXES, SUFFIXES, strict=True)):
    for i, (prompt, completion) in enumerate(group):
      out[p, i, : len(completion)] = oracle.logprobs(config, params, [*prefix, *prompt], completion, temperature)
  return out


@pytest.mark.parametrize("config", [oracle.QWEN3, oracle.QWEN2, oracle.LLAMA], ids=lambda c: c.family)
def test_every_family_computes_what_a_plain_decoder_computes(config: DecoderConfig):
  params = oracle.draw(config, 3)
  if config.qkv_bias:
    assert {"q_bias", "k_bias", "v_bias"} <= params["layers"].keys()
  np.testing.assert_allclose(run(config, params, packed())[0], expected(config, params), atol=1e-5)


def test_a_row_is_the_same_alone_in_a_batch_and_at_any_padding(params):
  prompt, completion = SUFFIXES[0][0]
  plain = oracle.logprobs(CONFIG, params, [*PREFIXES[0], *prompt], completion)
  alone = pack(PREFIXES[:1], [[(prompt, completion)]], prefix_width=4, prompt_width=2, completion_width=COUNT)
  wide = packed(prefix_width=11, prompt_width=9, rows=3)
  for batch in (alone, packed(), wide):
    logp, entropy = run(CONFIG, params, batch)
    np.testing.assert_allclose(logp[0, 0, :3], plain, atol=1e-5)
    assert not logp[0, 0, 3:].any()
    assert not entropy[0, 0, 3:].any()
  _, entropy = run(CONFIG, params, packed())
  np.testing.assert_allclose(run(CONFIG, params, alone)[1][0, 0], entropy[0, 0], atol=1e-5)


def test_sharing_a_prefix_changes_nothing(params):
  """Every row with a prefix of one token, the rest of it in its own prompt."""
  own = [(prefix[:1], [*prefix[1:], *p], c) for prefix, g in zip(PREFIXES, SUFFIXES, strict=True) for p, c in g]
  unshared = packed([prefix for prefix, _, _ in own], [[(p, c)] for _, p, c in own])
  logp = run(CONFIG, params, packed())[0]
  np.testing.assert_allclose(
    run(CONFIG, params, unshared)[0][:, 0], np.stack([logp[0, 0], logp[0, 1], logp[1, 0]]), atol=1e-5
  )


def test_what_stands_in_padding_is_never_read(params):
  batch, garbage = packed(), np.random.default_rng(0)
  filled = batch.replace(
    prefix=np.where(batch.prefix_mask, batch.prefix, garbage.integers(53, size=batch.prefix.shape)),
    suffix=np.where(batch.suffix_mask, batch.suffix, garbage.integers(53, size=batch.suffix.shape)),
  )
  for a, b in zip(run(CONFIG, params, batch), run(CONFIG, params, filled), strict=True):
    np.testing.assert_array_equal(a, b)


def test_hidden_prefix_tokens_are_unseen_and_keep_their_positions(params):
  batch = packed()
  keep = np.ones((*batch.suffix.shape[:2], batch.prefix.shape[1]), bool)
  keep[0, 0, [1, 2]] = False
  logp = run(CONFIG, params, batch.replace(prefix_keep=keep))[0]
  prompt, completion = SUFFIXES[0][0]
  ids = [*PREFIXES[0], *prompt, *completion]
  visible = np.ones((len(ids),) * 2, bool)
  visible[len(PREFIXES[0]) :, [1, 2]] = False
  table = oracle.log_softmax(oracle.logits(CONFIG, params, ids, visible))
  first = len(ids) - len(completion)
  np.testing.assert_allclose(logp[0, 0, :3], table[np.arange(first, len(ids)) - 1, completion], atol=1e-5)
  untouched = expected(CONFIG, params)
  np.testing.assert_allclose(logp[0, 1], untouched[0, 1], atol=1e-5)
  assert np.abs(logp[0, 0] - untouched[0, 0]).max() > 1e-2


def test_a_row_of_padding_and_a_hidden_prefix_have_finite_gradients(params):
  batch = packed(rows=3)
  batch = batch.replace(prefix_keep=np.zeros((2, 3, batch.prefix.shape[1]), bool))
  grads = jax.jit(jax.grad(lambda p: sum(a.sum() for a in decoder.token_logprobs(CONFIG, p, batch, COUNT))))(params)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.fixture(scope="module")
def slope(params) -> decoder.Params:
  """Gradient of the plain log-softmax over all logits at once, at temperature 0.7."""
  batch = packed()

  def plain(params):
    z = decoder.logits(params, decoder.hidden(CONFIG, params, batch)[:, :, -COUNT - 1 : -1], 0.7)
    logp = jnp.take_along_axis(jax.nn.log_softmax(z), batch.suffix[..., -COUNT:, None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(batch.suffix_mask[..., -COUNT:], logp, 0) * jnp.arange(1, COUNT + 1))

  return jax.jit(jax.grad(plain))(params)


@pytest.mark.parametrize(("chunk", "remat"), [(5, True), (1024, False)])
def test_neither_chunks_nor_rematerialisation_change_value_or_gradient(params, slope, chunk, remat):
  def loss(params):
    logp, _ = run(CONFIG, params, packed(), 0.7, chunk=chunk, remat=remat)
    return jnp.sum(logp * jnp.arange(1, COUNT + 1)), logp

  (_, logp), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
  np.testing.assert_allclose(logp, expected(CONFIG, params, 0.7), atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), grads, slope)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_entropy(params, temperature):
  entropy = run(CONFIG, params, packed(), temperature)[1]
  prompt, completion = SUFFIXES[0][0]
  ids = [*PREFIXES[0], *prompt, *completion]
  logp = oracle.log_softmax(oracle.logits(CONFIG, params, ids) / temperature)
  np.testing.assert_allclose(entropy[0, 0, :3], -(np.exp(logp) * logp).sum(-1)[-4:-1], atol=1e-5)


def test_bfloat16_stays_near(params):
  """Weights of the size that a trained network has: logits of a few units, where bfloat16 resolves 2^-8 of each."""
  small = jax.tree.map(lambda a: a * np.float32(0.25), params)
  close, _ = run(CONFIG, small, packed(), dtype="bfloat16")
  assert close.dtype == jnp.float32
  np.testing.assert_allclose(close, expected(CONFIG, small), atol=1e-2)


def test_parameters_have_the_documented_shapes():
  assert decoder.abstract(CONFIG)["layers"]["q"].shape == (2, 16, 4, 6)
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(decoder.abstract(CONFIG)))
  assert "head" not in decoder.abstract(CONFIG)
  assert decoder.abstract(oracle.LLAMA)["head"].shape == (16, 53)


@pytest.mark.parametrize(
  ("name", "config", "billions"),
  [
    ("Qwen3-0.6B", DecoderConfig(151936, 1024, 28, 16, 8, 128, 3072), 0.596),
    ("Qwen3-4B", DecoderConfig(151936, 2560, 36, 32, 8, 128, 9728), 4.022),
    ("SmolLM2-135M", DecoderConfig(49152, 576, 30, 9, 3, 64, 1536, qk_norm=False, family="llama"), 0.135),
  ],
)
def test_real_models_have_their_published_sizes(name, config, billions):
  params = decoder.abstract(config)
  assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9, 3) == billions, name
  batch = jax.eval_shape(lambda: packed())
  logp, _ = jax.eval_shape(lambda p, b: decoder.token_logprobs(config, p, b, COUNT), params, batch)
  assert (logp.shape, logp.dtype) == ((2, 2, COUNT), jnp.float32)


def test_positions_count_real_tokens_only(params):
  """The same tokens split anywhere between prefix, prompt and completion."""
  ids = [5, 9, 0, 31, 3, 8, 1, 2]
  cuts = [([*ids[:k]], [([*ids[k : k + 1]], ids[k + 1 :])]) for k in (3, 4, 5)]
  logp = run(CONFIG, params, packed([c[0] for c in cuts], [c[1] for c in cuts]))[0][:, 0]
  last = oracle.logprobs(CONFIG, params, ids[:6], ids[6:])
  for row, k in zip(logp, (3, 4, 5), strict=True):
    tail = row[: len(ids) - k - 1][-2:]
    np.testing.assert_allclose(tail, last, atol=1e-5)


def test_memory_of_an_update_is_linear_in_tokens_and_flat_in_vocabulary():
  """Of a gradient, as XLA plans it: twice the completions take twice the bytes, whatever there is to choose from."""

  def planned(vocab, rows, count=64):
    config = DecoderConfig(vocab, 32, 5, 2, 1, 16, 64, max_positions=512)
    prefix, suffix = (1, 64), (1, rows, count + 1)
    ids, masks = ([jax.ShapeDtypeStruct(shape, kind) for shape in (prefix, suffix)] for kind in (jnp.int32, jnp.bool_))
    batch = decoder.Shared(ids[0], masks[0], ids[1], masks[1])

    def loss(params, batch):
      return decoder.token_logprobs(config, params, batch, count, chunk=64, remat=True)[0].sum()

    compiled = jax.jit(jax.grad(loss)).lower(decoder.abstract(config), batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  few, many = ([planned(vocab, rows) for rows in (32, 64)] for vocab in (1024, 16384))
  assert 1.9 < few[1] / few[0] < 2.1
  assert abs((many[1] - many[0]) / (few[1] - few[0]) - 1) < 0.1
