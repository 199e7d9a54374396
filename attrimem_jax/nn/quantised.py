"""Matrices of a frozen model in 8 or 4 bits, with one scale per output of a layer, by qwix.

For models that only say something. What is rounded so has other log-probabilities, so nothing that trains on them, or
explains by them, may read it: `validation` keeps the two apart.
"""

import jax.numpy as jnp

from attrimem_jax.nn.decoder import Params
from attrimem_jax.nn.lora import TARGETS

BITS = {"int8": jnp.int8, "int4": jnp.int4}


def quantise(params: Params, kind: str) -> Params:
  """The same parameters with the matrices of all layers as `qwix.QArray`; embeddings, head and norms stay.

  Raises:
    ImportError: qwix is not installed.
  """
  try:
    import qwix
  except ImportError as error:
    raise ImportError(f"weights as {kind} need qwix: pip install 'attrimem_jax[quantised]'") from error
  layers = dict(params["layers"])
  for name, inputs in TARGETS.items():
    axes = (0, *range(1 + inputs, layers[name].ndim))
    layers[name] = qwix.quantize(jnp.asarray(layers[name]), BITS[kind], channelwise_axes=axes)
  return params | {"layers": layers}
