"""Trains a memory policy by GRPO with one reward per token that it wrote: AttriMem (arXiv 2607.21106), RL_Tok.

The policy writes memories of a history, a frozen answer model answers from them, and a LASSO over ablated contexts
tells what each written token did for the answer. Advantage of a token = outcome advantage of its rollout
+ `rl.lambda_` * z-scored attribution of the token.

  python -m attrimem_jax.main --config=configs/grpo_token.py                # the shipped small models
  python -m attrimem_jax.main --config=configs/grpo_token.py:smollm2 --config.data.path=locomo10.json

| preset            | policy                | needs           | what to expect                                        |
|-------------------|-----------------------|-----------------|-------------------------------------------------------|
| embedded, default | shipped with this     | 2 CPU cores     | under 10 minutes; better answers on unseen histories  |
| smollm2           | SmolLM2-135M-Instruct | CPU, 12 GiB     | a check that a real model runs through the same code  |
| qwen3_0_6b        | Qwen3-0.6B            | one GPU, 40 GiB | a small form of the paper's run                       |
| qwen3_4b          | Qwen3-4B              | 8 GPUs, 80 GiB  | the paper's batch, steps and rates; 5 days in the     |
|                   |                       |                 | paper, where LoCoMo goes from 67.88 to 72.05 (no SFT) |

The paper trains on LongMemEval; the presets of real models read LoCoMo. It does not publish the weight of the process
reward, KL and clip values, sampling, retrieval or prompts. Here KL (0.02, k3), clip range (0.2) and top-10 retrieval
are those of MemBuilder, which the paper builds on; sampling is untruncated, since top-p below 1 biases the ratio; and
`rl.lambda_` = 0.3 is a choice of ours.

Attribution is the paper's: a LASSO on 8 to 32 exact masks. `--config.attribution.gradients=1
--config.attribution.scorer=masked` takes derivatives instead; on memories of some 150 tokens that costs a seventh of 32
masks and ranks ablations far better (`launch/study_attribution.py`). On the short memories of the embedded models both
cost the same and train alike.

`--config.lora.targets="('q','k','v','o','gate','up','down')"` trains low-rank factors beside frozen weights, which
are the reference too: one copy of them, and moments and gradients of the factors alone.
"""

from ml_collections import ConfigDict

from attrimem_jax import config as schema


def get_config(preset: str = "") -> ConfigDict:
  config = schema.default()
  schema.choose(preset, PRESETS)(config)
  return config


def embedded(config: ConfigDict) -> None:
  config.train.steps = 36
  config.train.checkpoint_every = 10
  config.optim.lr = 4e-4
  config.optim.warmup = 2
  config.rollout.group_size = 8
  config.rollout.histories = 4
  config.rollout.max_new_tokens = 16
  config.rollout.bucket = 48
  config.answer.max_new_tokens = 16
  config.reward.questions = 6
  config.attribution.masks = ((0, 8),)
  config.eval.episodes = 64


def smollm2(config: ConfigDict) -> None:
  _real(config, model="smollm2-135m-instruct")
  config.rollout.group_size = 4
  config.rollout.histories = 1
  config.rollout.max_new_tokens = 64
  config.rollout.records_budget = 256
  config.rollout.horizon.bank = "empty"  # so few of its lines are actions that none would be found among other records
  config.policy.max_prompt = 2048
  config.answer.max_context = 2048
  config.reward.questions = 2
  config.optim.lr = 1e-5
  config.train.steps = 20
  config.train.checkpoint_every = 10
  config.eval.episodes = 1


def qwen3_0_6b(config: ConfigDict) -> None:
  _real(config, model="Qwen/Qwen3-0.6B")
  config.policy.dtype = config.answer.dtype = "bfloat16"
  config.rollout.histories = 4
  config.rl.micro_batches = 4


def qwen3_4b(config: ConfigDict) -> None:
  """8 histories of one session, 4 modules and 8 rollouts each: 32 prompts x 8 = the paper's batch of 256."""
  _real(config, model="Qwen/Qwen3-4B")
  config.policy.dtype = config.answer.dtype = "bfloat16"
  config.rollout.histories = 8
  config.rollout.max_new_tokens = 6000
  config.policy.max_prompt = 20_000
  config.mesh.fsdp = 8


def _real(config: ConfigDict, model: str) -> None:
  """LoCoMo, one session per rollout on the reference bank of the earlier ones; optimiser and masks of the paper."""
  config.data.name = "locomo"
  config.policy.model = config.answer.model = model
  config.policy.prompts = config.answer.prompts = "full"
  config.policy.max_prompt = 8192
  config.policy.overlong = "split"
  config.answer.max_context = 4096
  config.answer.max_new_tokens = 64
  config.rollout.horizon.sessions = 1
  config.rollout.horizon.bank = "reference"
  config.rollout.max_new_tokens = 512
  config.rollout.core_budget = 512
  config.rollout.records_budget = 1024
  config.rollout.bucket = 128
  config.rl.remat = True
  config.reward.kind = "f1"


PRESETS = {
  "": embedded,
  "embedded": embedded,
  "smollm2": smollm2,
  "qwen3_0_6b": qwen3_0_6b,
  "qwen3_4b": qwen3_4b,
}
