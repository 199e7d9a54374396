"""Serves models at http://127.0.0.1:8000/v1 to any client of OpenAI's API. Needs `pip install -e ".[serve]"`.

  python -m attrimem_jax.main --config=configs/serve.py
  python -m attrimem_jax.main --config=configs/serve.py --config.serve.models="('runs/mine/export',)"

Then, for instance, `OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any")`, with the names above as models. Chat
completions, completions (also of ids, with echo and log-probabilities), embeddings, streams (whose log-probabilities
come at the end). A policy that was trained here is served once
`configs/export.py` has written it. With $ATTRIMEM_API_KEY set, clients must send that key.
"""

from ml_collections import ConfigDict

from attrimem_jax import config as schema


def get_config(preset: str = "") -> ConfigDict:
  config = schema.default()
  config.job = "serve"
  schema.choose(preset, PRESETS)(config)
  return config


def embedded(config: ConfigDict) -> None:
  config.serve.models = ("embedded:policy", "embedded:answer")


def smollm2(config: ConfigDict) -> None:
  config.serve.models = ("smollm2-135m-instruct",)


PRESETS = {"": embedded, "embedded": embedded, "smollm2": smollm2}
