"""Explains which parts of a text an answer leaned on, with any model: a JSON file and an HTML page, no training.

  python -m attrimem_jax.main --config=configs/attribute.py --config.explain.context=notes.txt \\
    --config.explain.question="Where does Ann live?"
  python -m attrimem_jax.main --config=configs/attribute.py:smollm2 --config.explain.path=cases.json

A JSON file holds {"context": text or list of records, "question": …, "answer": …, "part": …} or a list of such. Without
an answer, the model's own is explained; with a part, only those words of it. `explain.sources` are tokens, words,
sentences or records (lines). `attribution.gradients=0` fits a LASSO to random masks instead of taking gradients.

| preset            | answer model                                                                  |
|-------------------|-------------------------------------------------------------------------------|
| embedded, default | shipped with this, for texts of the synthetic world                           |
| smollm2           | SmolLM2-135M-Instruct                                                         |
| qwen3_0_6b        | Qwen3-0.6B; any other by `--config.answer.model=<folder, .gguf file, hub id>` |
"""

from ml_collections import ConfigDict

from attrimem_jax import config as schema


def get_config(preset: str = "") -> ConfigDict:
  config = schema.default()
  config.job = "attribute"
  config.attribution.gradients = 5
  config.attribution.scorer = "masked"
  config.attribution.penalty = "held_out"
  schema.choose(preset, PRESETS)(config)
  return config


def embedded(config: ConfigDict) -> None:
  config.answer.model = "embedded:answer"


def smollm2(config: ConfigDict) -> None:
  _real(config, "smollm2-135m-instruct")


def qwen3_0_6b(config: ConfigDict) -> None:
  _real(config, "Qwen/Qwen3-0.6B")
  config.answer.dtype = "bfloat16"


def _real(config: ConfigDict, model: str) -> None:
  config.answer.model = model
  config.answer.prompts = "full"
  config.answer.max_new_tokens = 64


PRESETS = {
  "": embedded,
  "embedded": embedded,
  "smollm2": smollm2,
  "qwen3_0_6b": qwen3_0_6b,
}
