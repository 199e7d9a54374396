"""Trains the small byte-level BPE tokenizer of the embedded models on texts of the synthetic world.

    python -m attrimem_jax.text.train --out attrimem_jax/assets/tokenizer

Takes about half a minute on one core and always writes the same files. Nearly every name and value of that world
becomes one token; every other text still encodes, byte by byte where it must.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> tokenizers.Tokenizer:
  """Returns a byte-level BPE tokenizer (Radford et al. 2019) with the control tokens of ChatML at ids 0 to 2.

  Args:
    texts: what to learn merges from.
    vocab_size: upper bound; fewer tokens come out once every word of `texts` is one token.

  Raises:
    ValueError: if `vocab_size` has no room for 256 bytes and the control tokens.
  """
  least = 256 + len(CONTROL)
  if vocab_size < least:
    raise ValueError(f"train_tokenizer got vocab_size {vocab_size}: give at least {least}, for all bytes and {CONTROL}")
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    min_frequency=2,
    special_tokens=list(CONTROL),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: str | pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json as transformers' `AutoTokenizer` reads them."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "bos_token": None,
    "unk_token": None,
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "chat_template": CHAT_TEMPLATE,
  }
  text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
  (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
  from attrimem_jax.data import corpus  # here, so that the tokenizer can be trained on other texts without the world

  parser = argparse.ArgumentParser(description="Train the tokenizer of the embedded models.")
  parser.add_argument("--out", required=True, help="folder to write")
  parser.add_argument("--vocab-size", type=int, default=4096, help="upper bound; words run out before")
  parser.add_argument("--episodes", type=int, default=3000, help="episodes of the train split to read")
  args = parser.parse_args()
  tokenizer = train_tokenizer(corpus.texts(args.episodes), args.vocab_size)
  save(tokenizer, args.out)
  print(f"{args.out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
  main()
