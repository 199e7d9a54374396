"""Supervised warm start: the policy learns to write what a teacher writes, or the answer model to answer from memory.

  python -m attrimem_jax.main --config=configs/sft.py             # the shipped policy, from the shipped answer model
  python -m attrimem_jax.main --config=configs/sft.py:answer      # the shipped answer model
  python -m attrimem_jax.main --config=configs/sft.py:smollm2     # SmolLM2-135M-Instruct learns the action grammar

| preset          | what is trained                                        | needs                          |
|-----------------|--------------------------------------------------------|--------------------------------|
| policy, default | the shipped policy, from the shipped answer model      | 2 CPU cores, 6 minutes         |
| answer          | the shipped answer model, from random weights          | 2 CPU cores, 44 minutes        |
| smollm2         | SmolLM2-135M-Instruct on the teacher: the grammar      | 2 CPU cores, some minutes      |

The teacher of the policy is careless on purpose (`data.teacher`): it misses facts, keeps chatter and blurs values, so
that reinforcement learning has something to mend.
"""

from ml_collections import ConfigDict

from attrimem_jax import config as schema


def get_config(preset: str = "") -> ConfigDict:
  config = schema.default()
  config.job = "sft"
  schema.choose(preset, PRESETS)(config)
  return config


def policy(config: ConfigDict) -> None:
  """Starts from the answer model's weights: it can copy names and values already, which takes longest to learn."""
  _small(config)
  config.policy.model = "embedded:answer"
  config.data.teacher.miss = 0.5
  config.data.teacher.chatter = 0.3
  config.data.teacher.blur = 0.3
  config.sft.widths = {"rows": 4, "prefix": 112, "prompt": 32, "completion": 24}
  config.optim.name = "muon"
  config.optim.lr = 3e-3
  config.train.steps = 1000


def answer(config: ConfigDict) -> None:
  _small(config)
  config.sft.from_scratch = True
  config.sft.init.layers = 3
  config.sft.init.hidden = 256
  config.optim.name = "muon"
  config.optim.lr = 6e-3
  config.sft.task = "answer"
  config.sft.widths = {"rows": 8, "prefix": 128, "prompt": 16, "completion": 12}
  config.data.synthetic.questions = (8, 8)
  config.train.steps = 3000


def smollm2(config: ConfigDict) -> None:
  config.policy.model = "smollm2-135m-instruct"
  config.policy.prompts = "full"
  config.policy.max_prompt = 4096
  config.sft.batch = 1
  config.sft.widths = {"rows": 4, "prefix": 352, "prompt": 208, "completion": 24}
  config.optim.lr = 2e-4
  config.optim.schedule = "cosine"
  config.optim.warmup = 2
  config.train.steps = 24
  config.train.log_every = 12


def _small(config: ConfigDict) -> None:
  config.sft.batch = 16
  config.optim.schedule = "cosine"
  config.optim.final_fraction = 0.05
  config.optim.warmup = 100
  config.optim.b2 = 0.98
  config.optim.weight_decay = 0.01
  config.train.log_every = 50
  config.train.checkpoint_every = 250
  config.export.dtype = "bfloat16"


PRESETS = {
  "": policy,
  "policy": policy,
  "answer": answer,
  "smollm2": smollm2,
}
