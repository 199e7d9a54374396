"""A model small enough for the float64 decoder to check it row by row."""

import dataclasses

from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.nn.decoder import Params
from tests.nn import oracle


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """What scoring needs of a language model."""

  name: str
  config: DecoderConfig
  params: Params


MODEL = Model("tiny", dataclasses.replace(oracle.QWEN3, max_positions=64), oracle.draw(oracle.QWEN3, 1))
PREFIX = [3, 1, 4]


def score(prompt, answer) -> float:
  """Log-probability of `answer` after PREFIX and `prompt`, in float64."""
  return float(oracle.logprobs(MODEL.config, MODEL.params, [*PREFIX, *prompt], answer).sum())
