"""What a plan says against counts by the compiler, by hand and by the arrays themselves."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from attrimem_jax import config as schema
from attrimem_jax.io import models
from attrimem_jax.jobs import plan
from attrimem_jax.nn import decoder, sharding
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.validation import validate

SMALL = DecoderConfig(512, 64, 2, 4, 2, 16, 160, tied=False)


def recipe(preset: str = "", **changes):
  config = schema.recipe("configs/grpo_token.py", preset)
  config.job = "plan"
  with config.unlocked():
    config.update_from_flattened_dict(changes)
  return config


@pytest.fixture(autouse=True)
def _in_repository(repository, monkeypatch):
  monkeypatch.chdir(repository)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("qwen3-1.7b", 1.721), ("Qwen/Qwen3-4B", 4.022)])
def test_shapes_of_the_manifest_have_the_published_number_of_parameters(name, billions):
  assert plan.parameters(models.shape(name)) / 1e9 == pytest.approx(billions, abs=6e-4)


def test_a_shape_that_nobody_knows(monkeypatch):
  monkeypatch.setattr(models, "_hub_folder", lambda *_: None)
  with pytest.raises(ValueError, match="shape of 'some/model' is not known without its files: fetch them"):
    models.shape("some/model")
  assert models.shape("embedded:answer") == models.load("embedded:answer").config


def test_flops_against_the_compilers_count():
  """One prefix of 64 tokens and 4 suffixes of 32 of which 16 are scored; the compiler counts norms and softmax too."""
  shared = decoder.Shared(
    *(jax.ShapeDtypeStruct(shape, kind) for shape in ((1, 64), (1, 4, 32)) for kind in (jnp.int32, jnp.bool_))
  )
  run = jax.jit(lambda p, batch: decoder.token_logprobs(SMALL, p, batch, 16)[0])
  counted = run.lower(decoder.abstract(SMALL), shared).compile().cost_analysis()["flops"]
  # Here every query is multiplied with every key of its part, also with those that it may not see. Of the last layer
  # the compiler leaves out all of the prefix but its keys and values.
  expected = plan.forward(SMALL, 64, 64) + plan.forward(SMALL, 4 * 32, 64 + 32, 4 * 16)
  unused = 2 * 64 * (2 * 64 * 4 * 16 + 3 * 64 * 160) + 4 * 64 * 64 * 4 * 16
  assert expected - unused == pytest.approx(counted, rel=0.06)
  assert expected - unused < counted


def test_bytes_on_a_device_are_those_of_its_arrays():
  mesh = sharding.make_mesh()
  params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), decoder.abstract(SMALL))
  assert plan.bytes_on_a_device(params, mesh) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert plan.parameters(SMALL) * 4 == plan.bytes_on_a_device(params, mesh)


def test_arguments_of_the_compiled_update_are_the_parts_of_the_plan():
  config = recipe(**{"plan.session": 40, "plan.prompt": 20, "rollout.histories": 2, "rollout.group_size": 2})
  mesh = sharding.make_mesh()
  held = plan.memory(config, SMALL, SMALL, mesh)
  compiled = plan.compile_update(config, SMALL, mesh)
  batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan._batch(config)))
  expected = held["weights"] + held["moments"] + held["reference"] + batch + 4  # and the number of the step
  assert compiled.arguments == expected
  assert compiled.temporary > held["gradients"]


def test_low_rank_factors_leave_the_frozen_weights_and_little_else():
  small = {"plan.session": 40, "plan.prompt": 20, "rollout.histories": 2, "rollout.group_size": 2}
  config = recipe(**small, **{"lora.targets": ("q", "o", "down"), "lora.rank": 4})
  config.answer.model = config.policy.model
  mesh = sharding.make_mesh()
  held, whole = (plan.memory(c, SMALL, SMALL, mesh) for c in (config, recipe(**small)))
  numbers = 2 * 4 * ((64 + 4 * 16) + (4 * 16 + 64) + (160 + 64))  # layers, rank, inputs and outputs
  weights = 4 * plan.parameters(SMALL)
  assert held["weights"] == whole["weights"] == whole["gradients"] == whole["reference"] == weights
  assert held["low-rank factors"] == held["gradients"] == 4 * numbers
  assert held["moments"] == 8 * numbers + 8  # Adam's two, its count and the schedule's
  assert "reference" not in held
  assert "answer model" not in held  # the same weights, frozen too
  compiled = plan.compile_update(config, SMALL, mesh)
  batch = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan._batch(config)))
  assert compiled.arguments == weights + 4 * numbers + held["moments"] + batch + 4
  assert compiled.temporary < plan.compile_update(recipe(**small), SMALL, mesh).temporary
  frozen = recipe(**small, **{"lora.targets": ("q",), "rl.kl": 0.0})
  frozen.answer.model = frozen.policy.model
  assert "answer model" not in plan.memory(frozen, SMALL, SMALL, mesh)


def test_keys_while_writing_by_hand_and_bounded_by_the_queue():
  sizes = {"plan.session": 100, "plan.prompt": 10, "plan.completion": 5, "rollout.histories": 2}
  sizes |= {"rollout.group_size": 3, "rollout.modules": ("core", "semantic"), "policy.dtype": "bfloat16"}
  name, mesh = "keys and values while writing (model)", sharding.make_mesh()
  per_token = 2 * SMALL.layers * SMALL.kv_heads * SMALL.head_size * 2
  held = plan.memory(recipe(**sizes), SMALL, SMALL, mesh)
  assert held[name] == 2 * (100 + 6 * 15) * per_token
  queued = plan.memory(recipe(**sizes, **{"rollout.at_once": 4}), SMALL, SMALL, mesh)
  assert queued[name] == 2 * (100 + 2 * 15) * per_token
  always = held["weights"] + held["moments"] + held["reference"] + held.get("answer model", 0)
  update = held["gradients"] + held["activations (model)"] + held["largest array: attention scores (model)"]
  assert plan.needed(held) == always + max(update, held[name])
  assert plan.needed(held | {name: 10 * update}) == always + 10 * update


def test_flops_of_an_update_with_factors_by_hand():
  sizes = {"plan.session": 100, "plan.prompt": 10, "plan.completion": 5, "rollout.histories": 2}
  sizes |= {"rollout.group_size": 3, "rollout.modules": ("core", "semantic")}
  config = recipe(**sizes, **{"lora.targets": ("q", "up"), "lora.rank": 4})
  write, _, _, update = plan.phases(config, SMALL, SMALL)
  whole_write, _, _, whole = plan.phases(recipe(**sizes), SMALL, SMALL)
  factors = 2 * 380 * 2 * 4 * ((64 + 64) + (64 + 160))  # of one forward pass over 380 tokens
  matrices = 2 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 160)
  spared = 2 * (380 * matrices + 60 * 64 * 512)
  assert update.flops == whole.flops - spared + 3 * factors
  assert write.flops == whole_write.flops + factors


def test_tokens_and_passes_by_hand():
  config = recipe(
    **{
      "plan.session": 100,
      "plan.prompt": 10,
      "plan.completion": 5,
      "plan.context": 50,
      "plan.answer": 4,
      "rollout.histories": 2,
      "rollout.group_size": 3,
      "rollout.modules": ("core", "semantic"),
      "reward.questions": 6,
      "attribution.masks": ((0, 8), (10, 16)),
    }
  )
  write, answer, score, update = plan.phases(config, SMALL, SMALL)
  assert write.tokens == update.tokens == 2 * 100 + 12 * 15
  assert answer.tokens == 36 * 54
  assert score.tokens == 36 * 8 * (25 + 4)
  assert plan.phases(config, SMALL, SMALL, 10)[2].tokens == 2 * score.tokens
  once = plan.forward(SMALL, 200, 50) + plan.forward(SMALL, 180, 107.5, 60)
  assert update.flops == 4 * once  # forward, backward twice that, and the reference
  config.rl.kl = 0.0
  config.rl.remat = True
  assert plan.phases(config, SMALL, SMALL)[3].flops == 4 * once
  config.attribution.gradients, config.attribution.scorer = 2, "cached"
  assert plan.phases(config, SMALL, SMALL)[2].tokens == 36 * (50 + 6 * 4)
  config.rl.lambda_ = 0.0
  assert plan.phases(config, SMALL, SMALL)[2].tokens == 0


def test_what_sharing_and_cheaper_attributions_save():
  sizes = {"plan.session": 100, "plan.prompt": 10, "plan.completion": 5, "plan.context": 50, "plan.answer": 4}
  config = recipe(**sizes, **{"rollout.histories": 2, "rollout.group_size": 3, "rollout.modules": ("core", "semantic")})
  alone = plan.phases(config, SMALL, SMALL, shared=False)
  assert alone[0].tokens == alone[3].tokens == 12 * (100 + 10 + 5)  # 2 histories, 3 rollouts, 2 modules
  once = plan.forward(SMALL, 12 * 115, 115 / 2, 12 * 5)
  assert alone[3].flops == pytest.approx(4 * once)
  shared = plan.phases(config, SMALL, SMALL)
  assert alone[1:3] == shared[1:3]
  masks = plan.phases(plan.attributed(config, "exact", 0), SMALL, SMALL)[2]
  assert masks == shared[2]  # the recipe's own
  gradient = plan.phases(plan.attributed(config, "masked", 1), SMALL, SMALL)[2]
  asked = 2 * 3 * config.reward.questions
  assert gradient.tokens == asked * 3 * 54
  assert config.attribution.gradients == 0  # a copy was changed


def test_hours_by_hand():
  config = recipe(**{"train.steps": 15, "attribution.masks": ((0, 8), (10, 16)), "plan.utilisation": 0.5})
  device = plan.Accelerator(1e9, 1e30, 1e9)  # bandwidth is no limit
  first, later = (sum(p.flops for p in plan.phases(config, SMALL, SMALL, step)) for step in (0, 10))
  expected = (10 * first + 5 * later) / 1e9 / 2 / 0.5 / 3600
  assert plan.hours(config, SMALL, SMALL, 2, device) == pytest.approx(expected)
  slow = plan.Accelerator(1e30, 1e6, 1e9)
  traffic = sum(p.traffic for p in plan.phases(config, SMALL, SMALL))
  assert plan.hours(config, SMALL, SMALL, 1, slow) == pytest.approx(15 * traffic / 1e6 / 0.5 / 3600)


def test_a_plan_needs_no_data_and_refuses_what_training_would():
  validate(recipe("qwen3_4b"), 8)
  with pytest.raises(ValueError, match=r"plan.utilisation: must lie in \(0, 1\]"):
    validate(recipe(**{"plan.utilisation": 1.5}))
  with pytest.raises(ValueError, match=r"rl\.micro_batches"):
    validate(recipe(**{"rl.micro_batches": 3}))


@pytest.mark.slow
def test_the_plan_of_the_published_run_is_made_here(command, tmp_path):
  process = command(
    tmp_path,
    "--config.job=plan",
    "--config.policy.model=Qwen/Qwen3-0.6B",
    "--config.answer.model=Qwen/Qwen3-0.6B",
    "--config.plan.session=512",
    "--config.plan.completion=64",
    "--config.mesh.fsdp=2",
    "--config.rl.micro_batches=1",
    recipe="grpo_token.py:qwen3_0_6b",
  )
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output
  found = json.loads((tmp_path / "plan.json").read_text())
  assert found["devices"] == 2
  assert found["compiled"]["arguments"] / 2**30 == pytest.approx(0.596e9 * 4 * 4 / 2 / 2**30, rel=0.01)
  assert "H800" in output
  assert not (tmp_path / "checkpoints").exists()
