"""Which turns to keep of a long history: the table of arXiv 2606.12945 on LongMemEval-S, with controls.

  python -m attrimem_jax.main --config=configs/retention.py --config.data.path=longmemeval_s_cleaned.json
  python -m attrimem_jax.main --config=configs/retention.py:oracle --config.data.path=longmemeval_s_cleaned.json

Keeps 30 % of the turns and counts how many that carry the answer are among them, over 20 random halves of the cases.
Reads JSON, or JSON lines, also compressed by xz. `retention.keep` is the share kept;
`retention.turns=user` ranks what the user said alone, where knowing who speaks is no help.

| preset         | goal of a turn                                                    |
|----------------|-------------------------------------------------------------------|
| blind, default | what the user spoke of in the same session                        |
| oracle         | the question that will be asked: an upper bound, no memory has it |
"""

from ml_collections import ConfigDict

from attrimem_jax import config as schema


def get_config(preset: str = "") -> ConfigDict:
  config = schema.default()
  config.job = "retention"
  schema.choose(preset, PRESETS)(config)
  return config


def blind(config: ConfigDict) -> None:
  config.retention.regime = "blind"


def oracle(config: ConfigDict) -> None:
  config.retention.regime = "oracle"


PRESETS = {"": blind, "blind": blind, "oracle": oracle}
