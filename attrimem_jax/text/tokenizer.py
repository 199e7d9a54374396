"""A byte-level BPE tokenizer that keeps text apart from control tokens.

Reads the `tokenizer.json` of Qwen, SmolLM2 and this project's own models. Three things differ from the usual wrapper:

- `encode` is for text that somebody typed. It can never yield an added token: `<|im_end|>` in a chat message is six
  ordinary tokens, not the end of the message. Control tokens are asked for by name with `control`;
- every id has its raw bytes, so that a token which holds half of an emoji is not lost on the way to a string;
- nothing is added: no beginning-of-text id, no padding, no truncation, whatever the file says.
"""

import builtins
import contextlib
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


def byte_alphabet() -> dict[str, int]:
  """The printable characters that byte-level vocabularies write for the 256 bytes (Radford et al. 2019, GPT-2).

  Bytes that print in Latin-1 stand for themselves; the other 68 take the code points from 256 on, in order.
  """
  printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  hidden = (byte for byte in range(256) if byte not in printable)
  return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class Tokenizer:
  """Ids, bytes and control tokens of one vocabulary. Build it with `Tokenizer.load(folder)`.

  Attributes:
    vocab_size: one more than the largest id of the vocabulary (a model may have more rows than that: padding).
    control_ids: ids of all added tokens, special or not; `encode` never yields one of them.
    stop_ids: ids that end a completion: `<|im_end|>` first where the vocabulary has it, then the file's end tokens.
    pad_id: an id that may fill unused positions; no code may compare against it, since it is often a stop id too.
    chat_template: the Jinja text that came with the model, or None. It is read for facts, never rendered.
    fingerprint: SHA-256 over vocabulary and merges; equal for tokenizers whose ids mean the same.
  """

  def __init__(self, spec: dict, settings: dict | None = None, end_ids: Sequence[int] = (), source: str = "tokenizer"):
    """Args: parsed `tokenizer.json`, parsed `tokenizer_config.json`, more end ids, and a name for error messages."""
    with readable(source):
      self._build(spec, dict(settings or {}), end_ids, source)

  def _build(self, spec: dict, settings: dict, end_ids: Sequence[int], source: str) -> None:
    self._spec, self._settings, self.source = spec, settings, source
    _require_byte_level(spec, source)
    _require_entries(spec)
    self._added = {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
    self.control_ids = frozenset(self._added.values())
    self._bytes = _bytes_by_id(spec["model"]["vocab"], self._added, source)
    self.vocab_size = max(self._bytes) + 1
    self._plain = _plain_backend(spec, self.control_ids)
    self._unknown = _unknown_bytes(spec["model"]["vocab"], self.control_ids)
    self.chat_template: str | None = self._settings.get("chat_template")
    self.stop_ids = self._find_stop_ids(end_ids)
    self.pad_id = self._named("pad_token", self.stop_ids[0])

  @classmethod
  def load(cls, folder: str | pathlib.Path) -> "Tokenizer":
    """Reads `tokenizer.json` and the configuration files beside it. Raises ValueError with what is wrong."""
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise ValueError(
        f"no tokenizer.json in {folder}; export the model with its fast tokenizer (`tokenizer.save_pretrained(folder)`)"
      )
    settings = read_json(folder / "tokenizer_config.json")
    with readable(str(folder)):
      settings["chat_template"] = _chat_template(folder, settings)
    ends = [read_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    flat = [i for end in ends for i in (end if isinstance(end, list) else [end]) if i is not None]
    return cls(read_json(folder / "tokenizer.json"), settings, flat, str(folder))

  def save(self, folder: str | pathlib.Path) -> None:
    """Writes the three files that `load` and transformers' `AutoTokenizer` read."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in self._settings.items() if value is not None}
    generation = {"eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
    _write_json(folder / "tokenizer.json", self._spec)
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)
    _write_json(folder / "generation_config.json", generation)

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, never an added token. Raises ValueError where a character has no bytes or no tokens."""
    try:
      data = text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(
        f"cannot encode {text[error.start]!r} at character {error.start}: a lone surrogate is not text; "
        'clean the input, e.g. text.encode("utf-8", "replace").decode()'
      ) from None
    if self._unknown and (found := self._unknown.search(data)):
      raise ValueError(
        f"cannot encode byte {found[0]!r} at byte {found.start()}: the vocabulary of {self.source} has no token "
        "for it; remove the character from the input"
      )
    return self._plain.encode(text, add_special_tokens=False).ids

  def bytes(self, token: int) -> builtins.bytes:
    """Raw bytes of one id: an added token's name, and U+FFFD for an id that only pads the rows of a model."""
    if token < 0:
      raise ValueError(f"token id {token} is negative; ids start at 0")
    return self._bytes.get(int(token), _REPLACEMENT)

  def pieces(self, ids: Iterable[int]) -> list[builtins.bytes]:
    """Raw bytes of each id."""
    return [self.bytes(token) for token in ids]

  def decode(self, ids: Iterable[int]) -> str:
    """A view of the ids for people; bytes that are no UTF-8 show as U+FFFD. Never encode it again: ids may change."""
    return b"".join(self.pieces(ids)).decode(errors="replace")

  def control(self, name: str) -> int:
    """Id of an added token such as `<|im_start|>`. Raises ValueError if the vocabulary has no such token."""
    if name not in self._added:
      known = ", ".join(sorted(self._added)[:12])
      raise ValueError(f"the tokenizer of {self.source} has no control token {name!r}; it has: {known}")
    return self._added[name]

  def has_control(self, name: str) -> bool:
    """Whether `control(name)` would succeed."""
    return name in self._added

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 over vocabulary and merges, whichever of the two spellings of a merge the file uses."""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in self._spec["model"]["merges"]]
    vocabulary = sorted({**self._spec["model"]["vocab"], **self._added}.items())
    return hashlib.sha256(json.dumps([vocabulary, merges]).encode()).hexdigest()

  def _named(self, role: str, default: int | None) -> int | None:
    """Id of `eos_token`, `pad_token`, … as the settings name it."""
    name = self._settings.get(role)
    name = name["content"] if isinstance(name, dict) else name
    return self._added.get(name, self._spec["model"]["vocab"].get(name, default))

  def _find_stop_ids(self, end_ids: Sequence[int]) -> tuple[int, ...]:
    candidates = (self._added.get("<|im_end|>"), self._named("eos_token", None), *end_ids)
    found = tuple(dict.fromkeys(i for i in candidates if i is not None))
    if not all(type(i) is int and i >= 0 for i in found):
      raise ValueError(f"the end tokens of {self.source} are {found}: make eos_token_id an id, or a list of ids")
    if not found:
      raise ValueError(f"{self.source} names no end token; set eos_token in tokenizer_config.json")
    return found


@contextlib.contextmanager
def readable(source: str) -> Iterator[None]:
  """Makes of whatever goes wrong with a damaged tokenizer one ValueError that names `source`."""
  try:
    yield
  except Exception as error:  # the tokenizers package raises Exception itself; a damaged dict can raise anything
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
      raise
    raise ValueError(
      f"the tokenizer of {source} is damaged ({type(error).__name__}: {str(error)[:200]}); copy it again, or export it "
      "with `tokenizer.save_pretrained(folder)`"
    ) from error


def read_json(path: pathlib.Path) -> dict:
  """The object in a JSON file, {} where there is no such file. Raises ValueError where it holds anything else."""
  if not path.is_file():
    return {}
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not valid JSON: {error}; copy the file again") from None
  if not isinstance(content, dict):
    raise ValueError(f"{path} holds a {type(content).__name__} instead of an object; copy the file again")
  return content


def _write_json(path: pathlib.Path, content: dict) -> None:
  path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _chat_template(folder: pathlib.Path, settings: dict) -> str | None:
  """The template lies in a file of its own (newer exports) or in the settings, alone or as a list with names."""
  separate = folder / "chat_template.jinja"
  if separate.is_file():
    return separate.read_text(encoding="utf-8")
  template = settings.get("chat_template")
  if isinstance(template, list):
    template = {entry["name"]: entry["template"] for entry in template}.get("default")
  if template is not None and not isinstance(template, str):
    raise TypeError(f"its chat template is a {type(template).__name__}")
  return template


def _steps(part: dict | None, key: str) -> list[dict]:
  """A tokenizer.json part is one step, or a Sequence that holds the steps under `key`."""
  part = part or {}
  return part.get(key, []) if part.get("type") == "Sequence" else [part]


def _require_byte_level(spec: dict, source: str) -> None:
  model = spec.get("model") or {}
  steps = _steps(spec.get("pre_tokenizer"), "pretokenizers")
  levels = [step for step in steps if step.get("type") == "ByteLevel"]
  kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
  if kind != "BPE" or not levels or model.get("byte_fallback"):
    raise ValueError(
      f"the tokenizer of {source} is {kind} with pre-tokenizer {[step.get('type') for step in steps]}; "
      "only byte-level BPE (Qwen, SmolLM2, GPT-2 style) keeps bytes and tokens in step: choose such a model"
    )
  if any(level.get("add_prefix_space") for level in levels):
    raise ValueError(
      f"the tokenizer of {source} puts a space before every text (add_prefix_space), so that joined parts would "
      "gain spaces; set add_prefix_space to false in its tokenizer.json"
    )


def _require_entries(spec: dict) -> None:
  """Raises TypeError where a vocabulary, a merge or an added token has another form than the format gives it."""
  model, added = spec["model"], spec.get("added_tokens") or []
  ids = [*model["vocab"].values(), *(token["id"] for token in added)]
  if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
    raise TypeError("an id of its vocabulary is no whole number")
  if not all(isinstance(name, str) for name in (*model["vocab"], *(token["content"] for token in added))):
    raise TypeError("a token of its vocabulary is no text")
  pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
  if not all(isinstance(p, list | tuple) and len(p) == 2 and all(isinstance(a, str) for a in p) for p in pairs):
    raise TypeError("one of its merges is no pair of texts")


def _bytes_by_id(vocabulary: dict[str, int], added: dict[str, int], source: str) -> dict[int, bytes]:
  alphabet = byte_alphabet()
  controls = {token: name.encode() for name, token in added.items()}
  try:
    # Added tokens may stand in the vocabulary too, under names that are not in the byte alphabet.
    text = {i: bytes(alphabet[char] for char in name) for name, i in vocabulary.items() if i not in controls}
  except KeyError as error:
    raise ValueError(
      f"the vocabulary of {source} has the character {error.args[0]!r}, which is not of the byte-level alphabet; "
      "only byte-level BPE tokenizers are supported"
    ) from None
  return text | controls


def _plain_backend(spec: dict, controls: frozenset[int]) -> tokenizers.Tokenizer:
  """The same tokenizer without its added tokens, so that no text can spell one.

  They leave the vocabulary as well: a merge, `ignore_merges` or the unknown token could otherwise still produce one.
  """
  model = dict(spec["model"])
  kept = {name: i for name, i in model["vocab"].items() if i not in controls}
  pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
  merges = [[a, b] for a, b in pairs if a in kept and b in kept and a + b in kept]
  model |= {"vocab": kept, "merges": merges, "unk_token": None, "dropout": None}
  plain = spec | {"model": model, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
  return tokenizers.Tokenizer.from_str(json.dumps(plain))


def _unknown_bytes(vocabulary: dict[str, int], controls: frozenset[int]) -> re.Pattern[bytes] | None:
  """Matches the bytes that no token holds, which BPE would drop without a word (SmolLM2 lacks a few control codes)."""
  missing = [
    byte for char, byte in byte_alphabet().items() if vocabulary.get(char) is None or vocabulary[char] in controls
  ]
  return re.compile(b"[" + b"".join(re.escape(bytes([byte])) for byte in missing) + b"]") if missing else None
