import importlib.resources
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from attrimem_jax.io import huggingface
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.tokenizer import Tokenizer


def random_params(config, seed):
  """Parameters of plausible size, drawn by NumPy: `decoder.init` would compile for seconds."""
  rng = np.random.default_rng(seed)

  def leaf(path, shape):
    name = str(path[-1].key)
    return np.ones(shape.shape, np.float32) if name.endswith("norm") else rng.normal(0, 0.15, shape.shape).astype("f4")

  return jax.tree_util.tree_map_with_path(leaf, decoder.abstract(config))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
  """Two random models in folders of their own, with the shipped tokenizer: their paths."""
  with importlib.resources.as_file(importlib.resources.files("attrimem_jax") / "assets" / "tokenizer") as folder:
    tokenizer = Tokenizer.load(folder)
  config = DecoderConfig(tokenizer.vocab_size, 32, 2, 2, 1, 16, 48, max_positions=2048)
  paths = []
  for seed in (0, 1):
    paths.append(tmp_path_factory.mktemp("model"))
    huggingface.write(paths[-1], config, random_params(config, seed), tokenizer)
  return paths


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
  """Of runs in processes of their own: they share what they compile, so that each program is compiled once."""
  cache = tmp_path_factory.mktemp("compiled")
  return os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PLATFORMS": "cpu",
  }


@pytest.fixture(scope="session")
def command(tiny, environment, repository):
  """Starts a small training run: command(workdir, *overrides) -> Popen; `variables` add to its environment."""
  policy, answer = tiny

  def start(workdir, *overrides, recipe="grpo_token.py", variables=None):
    small = {
      "policy.model": policy,
      "answer.model": answer,
      "eval.episodes": 2,
      "eval.questions": 2,
      "rollout.group_size": 2,
      "rollout.histories": 2,
      "rollout.max_new_tokens": 8,
      "answer.max_new_tokens": 8,
      "reward.questions": 2,
      "train.steps": 4,
      "train.checkpoint_every": 1,
      "optim.lr": 0.01,
    }
    arguments = [f"--config.{name}={value}" for name, value in small.items()]
    return subprocess.Popen(
      [
        *[sys.executable, "-m", "attrimem_jax.main", f"--config=configs/{recipe}", f"--workdir={workdir}"],
        *arguments,
        *overrides,
      ],
      cwd=repository,
      env=environment | (variables or {}),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  return start
