"""Plain text never yields control ids; every id keeps its bytes; what cannot be encoded is an error that says so."""

import json
import pathlib

import pytest

from attrimem_jax.text.tokenizer import Tokenizer, byte_alphabet

TEXTS = [
  "",
  "hello the user",
  "I love 🦜",
  "日本語のテキスト、中文",
  "def f(x):\n\treturn x ** 2  # 12345\n\n",
  "tabs\t\r\n and   spaces  ",
  "\x00\x7f\u200d\u2028 caf\u00e9",
  "#12 UPDATE {braces} %s <|im_end|>\n<|im_start|>system\n<think>x</think><|endoftext|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_what_was_encoded_gives_the_text(tokenizer: Tokenizer, text: str):
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert b"".join(tokenizer.pieces(ids)) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_text_never_yields_a_control_token(tokenizer: Tokenizer, text: str):
  assert not tokenizer.control_ids & set(tokenizer.encode(text))


def test_every_control_token_typed_as_text_stays_text(tokenizer: Tokenizer):
  for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"):
    ids = tokenizer.encode(name)
    assert tokenizer.control(name) not in ids
    assert tokenizer.decode(ids) == name


def test_control_tokens_reachable_by_merges_stay_text(raw_spec: dict):
  """An added token that the merges could build, or that `ignore_merges` would take as a whole word."""
  model = raw_spec["model"]
  hello = model["vocab"]["hello"]
  raw_spec["added_tokens"].append({"id": hello, "content": "hello", "special": True})
  model["ignore_merges"], model["unk_token"] = True, "hello"
  tokenizer = Tokenizer(raw_spec, {"eos_token": "<|im_end|>"})
  ids = tokenizer.encode("hello")
  assert hello not in ids
  assert tokenizer.decode(ids) == "hello"
  assert len(ids) == 2


def test_normalisation_is_the_models_own(tokenizer: Tokenizer):
  assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_known_ids(tokenizer: Tokenizer, raw_spec: dict):
  vocab = raw_spec["model"]["vocab"]
  assert tokenizer.encode("hello the\n\n") == [vocab["hello"], vocab["Ġthe"], vocab["ĊĊ"]]


@pytest.mark.parametrize(("text", "position"), [("a\ud800b", 1), ("\udc80", 0)])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str, position: int):
  with pytest.raises(ValueError, match=f"character {position}.*surrogate"):
    tokenizer.encode(text)


def test_a_byte_without_a_token_is_refused(raw_spec: dict):
  """SmolLM2's vocabulary has no token for some control characters; BPE would drop them silently."""
  name = next(char for char, byte in byte_alphabet().items() if byte == 0x1D)
  raw_spec["model"]["vocab"].pop(name)
  tokenizer = Tokenizer(raw_spec, {"eos_token": "<|im_end|>"})
  assert tokenizer.decode(tokenizer.encode("fine")) == "fine"
  with pytest.raises(ValueError, match=r"x1d.* at byte 2"):
    tokenizer.encode("ab\x1dcd")


def test_bytes_of_parts_of_a_character(tokenizer: Tokenizer):
  ids = tokenizer.encode("🦜")
  assert [tokenizer.bytes(i) for i in ids] == [b"\xf0\x9f", b"\xa6", b"\x9c"]
  assert tokenizer.decode(ids[:1]) == "�"


def test_ids_beyond_the_vocabulary_show_as_replacement(tokenizer: Tokenizer):
  assert tokenizer.decode([tokenizer.vocab_size]) == "�"
  with pytest.raises(ValueError, match="negative"):
    tokenizer.bytes(-1)


def test_control_names(tokenizer: Tokenizer):
  assert tokenizer.bytes(tokenizer.control("<|im_end|>")) == b"<|im_end|>"
  assert tokenizer.has_control("<think>")
  assert not tokenizer.has_control("<tool>")
  with pytest.raises(ValueError, match=r"<tool>.*<\|im_end\|>"):
    tokenizer.control("<tool>")
  assert tokenizer.vocab_size == max(tokenizer.control_ids) + 1


def test_stop_and_pad_ids(raw_spec: dict):
  ends = {token["content"]: token["id"] for token in raw_spec["added_tokens"]}
  end, text_end = ends["<|im_end|>"], ends["<|endoftext|>"]
  base = Tokenizer(raw_spec, {"eos_token": {"content": "<|endoftext|>"}}, [text_end])
  assert base.stop_ids == (end, text_end)
  assert base.pad_id == end
  chat = Tokenizer(raw_spec, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
  assert chat.stop_ids == (end,)
  assert chat.pad_id == text_end


def test_no_end_token_is_an_error(raw_spec: dict):
  raw_spec["added_tokens"] = []
  with pytest.raises(ValueError, match="no end token"):
    Tokenizer(raw_spec)


def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: pathlib.Path):
  tokenizer.save(tmp_path / "model")
  again = Tokenizer.load(tmp_path / "model")
  for name in ("vocab_size", "stop_ids", "pad_id", "chat_template", "fingerprint", "control_ids"):
    assert getattr(again, name) == getattr(tokenizer, name), name
  assert [again.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


def test_fingerprint_depends_on_what_ids_mean(tokenizer: Tokenizer, raw_spec: dict):
  raw_spec["model"]["merges"] = [" ".join(pair) for pair in raw_spec["model"]["merges"]]
  assert Tokenizer(raw_spec, {"eos_token": "<|im_end|>"}).fingerprint == tokenizer.fingerprint
  raw_spec["model"]["merges"].pop()
  assert Tokenizer(raw_spec, {"eos_token": "<|im_end|>"}).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
    ({"pre_tokenizer": {"type": "Metaspace"}}, "Metaspace"),
    ({"pre_tokenizer": None}, "only byte-level BPE"),
    ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
  ],
)
def test_other_kinds_are_refused(raw_spec: dict, change: dict, message: str):
  with pytest.raises(ValueError, match=message):
    Tokenizer(raw_spec | change)


@pytest.mark.parametrize(
  "change",
  [
    {"model": None},
    {"model": []},
    {"model": {"type": "BPE", "vocab": [], "merges": []}},
    {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
    {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    {"model": {"type": "BPE", "vocab": {"a": 0}}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [3]}},
    {"added_tokens": [3]},
    {"added_tokens": [{"id": 1}]},
    {"added_tokens": [{"id": "1", "content": "x"}]},
    {"added_tokens": [{"id": 999, "content": "\ud800"}]},
    {"pre_tokenizer": [3]},
    {"pre_tokenizer": {"type": "ByteLevel", "use_regex": "x"}},
    {"normalizer": {"type": "nothing"}},
  ],
)
def test_what_is_no_tokenizer_is_named(raw_spec: dict, change: dict, tmp_path: pathlib.Path):
  (tmp_path / "tokenizer.json").write_text(json.dumps(raw_spec | change))
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
  with pytest.raises(ValueError, match=f"tokenizer of {tmp_path}"):
    Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("tokenizer.json", b"[]", "tokenizer.json holds a list instead of an object"),
    ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not valid JSON"),
    ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not valid JSON"),
    ("tokenizer.json", b"{}", "only byte-level BPE"),
    ("tokenizer_config.json", b"3", "tokenizer_config.json holds a int"),
    ("tokenizer_config.json", b'{"chat_template": 3}', "its chat template is a int"),
    ("tokenizer_config.json", b'{"chat_template": [{}]}', "is damaged"),
    ("tokenizer_config.json", b'{"eos_token": ["x"]}', "is damaged"),
    ("generation_config.json", b'{"eos_token_id": "x"}', "make eos_token_id an id, or a list of ids"),
    ("chat_template.jinja", b"\xff", "is damaged"),
  ],
)
def test_damaged_files_are_named(tokenizer: Tokenizer, tmp_path: pathlib.Path, name, content, message):
  tokenizer.save(tmp_path)
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    Tokenizer.load(tmp_path)


def test_a_vocabulary_outside_the_byte_alphabet_is_refused(raw_spec: dict):
  raw_spec["model"]["vocab"]["▁the"] = 999
  with pytest.raises(ValueError, match="'▁'"):
    Tokenizer(raw_spec)


def test_missing_and_broken_files(tmp_path: pathlib.Path):
  with pytest.raises(ValueError, match=r"no tokenizer\.json"):
    Tokenizer.load(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{")
  with pytest.raises(ValueError, match="not valid JSON"):
    Tokenizer.load(tmp_path)


def test_end_ids_and_template_are_found_where_exports_put_them(tokenizer: Tokenizer, tmp_path: pathlib.Path):
  tokenizer.save(tmp_path)
  settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
  settings["chat_template"] = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
  (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
  loaded = Tokenizer.load(tmp_path)
  assert loaded.chat_template == "y"
  assert loaded.stop_ids == (tokenizer.control("<|im_end|>"), 7, 9)
  (tmp_path / "chat_template.jinja").write_text("z")
  assert Tokenizer.load(tmp_path).chat_template == "z"


def test_ids_equal_those_of_transformers(tokenizer: Tokenizer, tmp_path: pathlib.Path):
  transformers = pytest.importorskip("transformers")
  tokenizer.save(tmp_path)
  reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in TEXTS[:-1]:
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
