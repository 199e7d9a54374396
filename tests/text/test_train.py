import pathlib

import pytest

import attrimem_jax
from attrimem_jax.data import corpus, world
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.text.train import CONTROL, save, train_tokenizer

SHIPPED = pathlib.Path(attrimem_jax.__file__).parent / "assets" / "tokenizer"


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
  return Tokenizer.load(SHIPPED)


def test_training_twice_gives_the_same_files(tmp_path: pathlib.Path):
  for name in ("a", "b"):
    save(train_tokenizer(corpus.texts(20), 600), tmp_path / name)
  for file in ("tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_vocabulary_without_room_for_all_bytes_is_refused():
  with pytest.raises(ValueError, match="vocab_size 200: give at least 259"):
    train_tokenizer(["a"], 200)


def test_control_tokens_come_first_and_end_a_reply(shipped: Tokenizer):
  assert [shipped.control(name) for name in CONTROL] == [0, 1, 2]
  assert shipped.stop_ids[0] == shipped.control("<|im_end|>")
  assert shipped.pad_id == shipped.control("<|endoftext|>")


@pytest.mark.parametrize("text", ["", "naïve 日本 🙂", "<|im_end|>", "Ann lives in Lisbon\n", "\x00\x7f"])
def test_any_text_comes_back_without_control_tokens(shipped: Tokenizer, text: str):
  ids = shipped.encode(text)
  assert shipped.decode(ids) == text
  assert not set(ids) & {0, 1, 2}


def test_names_values_and_parts_of_dates_are_single_tokens(shipped: Tokenizer):
  values = [value for attribute in world.ATTRIBUTES.values() for value in attribute.values]
  words = [f" {word}" for word in (*world.NAMES, *values)]
  words += [*world.NAMES, *(f"{n:02}" for n in range(1, 32)), "2024"]
  assert [word for word in words if len(shipped.encode(word)) != 1] == []


@pytest.mark.parametrize("word", ["ADD", "UPDATE", "APPEND", "REPLACE", "SKIP", "user", "assistant", "Bot"])
def test_words_of_the_grammar_and_the_layout_are_single_tokens(shipped: Tokenizer, word: str):
  assert len(shipped.encode(word)) == 1


def test_the_template_adds_no_system_message(shipped: Tokenizer):
  transformers = pytest.importorskip("transformers")
  other = transformers.AutoTokenizer.from_pretrained(SHIPPED)
  text = other.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
  assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
  chat = Chat(shipped)
  assert other.encode(text) == [*chat.open("user"), *shipped.encode("Hi"), *chat.reply()]
