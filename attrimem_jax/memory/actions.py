"""The action grammar: one action a line, and an action's text is literally the policy's own tokens.

    ADD <text>          UPDATE #<id> <text>        MERGE #<id> #<id> ... <text>        DELETE #<id>        SKIP
    APPEND <text>       REPLACE #<id> <text>       REWRITE <text>

`parse` works on bytes, because a token can hold half a character, and finds tokens by overlap: every token that holds a
byte of the text belongs to the text, also one that holds the line break (or the blank before the first word) as well.
Nothing is repaired: a line that is no action stays one and says why, so that sloppy output can earn its low reward.
"""

import dataclasses
import enum
import functools
import itertools
import re
from collections.abc import Iterator, Sequence

from attrimem_jax.text import spans
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import Finish, Module


class Op(enum.StrEnum):
  """What an action does to the bank; the value is the keyword that the policy writes."""

  ADD = "ADD"
  APPEND = "APPEND"
  UPDATE = "UPDATE"
  REPLACE = "REPLACE"
  MERGE = "MERGE"
  REWRITE = "REWRITE"
  DELETE = "DELETE"
  SKIP = "SKIP"


OPERATIONS: dict[Module, tuple[Op, ...]] = {
  Module.CORE: (Op.APPEND, Op.REPLACE, Op.REWRITE),
  Module.EPISODIC: (Op.ADD, Op.UPDATE, Op.MERGE),
  Module.SEMANTIC: (Op.ADD, Op.UPDATE, Op.DELETE, Op.SKIP),
  Module.PROCEDURAL: (Op.ADD, Op.UPDATE, Op.SKIP),
}

# How each operation is spelled; prompts show these lines, and a test parses them back.
FORMS: dict[Op, str] = {
  Op.ADD: "ADD <text>",
  Op.APPEND: "APPEND <text>",
  Op.UPDATE: "UPDATE #<number> <text>",
  Op.REPLACE: "REPLACE #<number> <text>",
  Op.MERGE: "MERGE #<number> #<number> <text>",
  Op.REWRITE: "REWRITE <text>",
  Op.DELETE: "DELETE #<number>",
  Op.SKIP: "SKIP",
}

_ONE_TARGET = frozenset({Op.UPDATE, Op.REPLACE, Op.DELETE})
_NO_TEXT = frozenset({Op.DELETE, Op.SKIP})


class Reason(enum.StrEnum):
  """Why an action was taken (`ok`) or rejected. `parse` knows those up to UNFINISHED, the bank the others."""

  OK = "ok"
  NOT_AN_ACTION = "not_an_action"  # unknown keyword, words after DELETE or SKIP, a control token in the line
  WRONG_MODULE = "wrong_module"  # an operation that this module does not have
  WRONG_TARGETS = "wrong_targets"  # no id, or fewer than two different ones for MERGE
  EMPTY_TEXT = "empty_text"
  UNFINISHED = "unfinished"  # the length limit cut this line
  UNKNOWN_ID = "unknown_id"  # no such record in this module
  SUPERSEDED = "superseded"  # the record is no longer current, and what replaced it says something else
  DUPLICATE = "duplicate"  # a current record of this module says the same
  UNCHANGED = "unchanged"  # the bank already is as the action wants it
  OVER_BUDGET = "over_budget"  # core memory would exceed its token budget


@dataclasses.dataclass(frozen=True)
class Action:
  """One line of a completion, read as an operation.

  Attributes:
    op: the operation, or None where the line names none.
    targets: the record ids it names, in order, without repeats.
    text: the text to store: a stripped view of its bytes ("" where there is none).
    ids: the completion's tokens that overlap the text.
    start, stop: their token range in the completion: `ids == completion[start:stop]`.
    reason: OK, or why it is rejected.
    line: the whole line as a view, stripped.
    line_start, line_stop: token range of the whole line, its line break included.
  """

  op: Op | None
  targets: tuple[int, ...]
  text: str
  ids: tuple[int, ...]
  start: int
  stop: int
  reason: Reason
  line: str
  line_start: int
  line_stop: int


def parse(ids: Sequence[int], tokenizer: Tokenizer, module: Module, finish: Finish) -> tuple[Action, ...]:
  """Reads a completion as actions of `module`; never raises, whatever was sampled.

  Args:
    ids: the completion, with or without its stop token; the first stop token ends the text.
    tokenizer: the policy's tokenizer.
    module: whose operations are allowed.
    finish: LENGTH means that the last line was cut, unless it ends with a line break.

  Returns:
    One action per line that is not blank, in order. An empty completion has none.
  """
  completion = _Completion.read(ids, tokenizer)
  lines = list(completion.lines())
  cut = finish == Finish.LENGTH and not completion.raw.endswith(b"\n")
  actions = [_action(completion, span, module, cut and span == lines[-1]) for span in lines]
  return tuple(action for action in actions if action is not None)


def render(op: Op, targets: Sequence[int] = (), text: str = "") -> str:
  """The line (without its line break) that `parse` reads as this action; whitespace in `text` is made single blanks."""
  return " ".join([op, *(f"#{target}" for target in targets), *text.split()])


@dataclasses.dataclass(frozen=True)
class _Completion:
  """A completion up to its first stop token, as bytes; `spans` holds each token's byte range."""

  ids: tuple[int, ...]
  pieces: tuple[bytes, ...]
  spans: list[tuple[int, int]]
  controls: tuple[int, ...]  # positions of tokens that are no text

  @classmethod
  def read(cls, ids: Sequence[int], tokenizer: Tokenizer) -> "_Completion":
    kept = tuple(itertools.takewhile(lambda i: i not in tokenizer.stop_ids, map(int, ids)))
    pieces = tuple(tokenizer.pieces(kept))
    # A model's output can be wider than its tokenizer (Qwen3: 151,936 against 151,669): such ids are no text either.
    controls = tuple(t for t, i in enumerate(kept) if i in tokenizer.control_ids or i >= tokenizer.vocab_size)
    return cls(kept, pieces, spans.offsets(pieces), controls)

  @functools.cached_property
  def raw(self) -> bytes:
    return b"".join(self.pieces)

  def lines(self) -> Iterator[tuple[int, int]]:
    """Byte spans of the reply's lines, each with its line break. What a model thinks before </think> is no reply."""
    end = next((t for t in self.controls if self.pieces[t] == b"</think>"), None)
    at = 0 if end is None else self.spans[end][1]
    if end is None and self.controls[:1] == (0,) and self.pieces[0] == b"<think>":
      yield 0, len(self.raw)  # a thought without an end is one faulty line
      return
    while at < len(self.raw):
      stop = self.raw.find(b"\n", at) + 1 or len(self.raw)
      yield at, stop
      at = stop

  def tokens(self, start: int, stop: int) -> tuple[int, int]:
    """The token range that overlaps the byte span start:stop."""
    return spans.overlap(self.spans, start, stop)

  def has_control(self, first: int, last: int) -> bool:
    return any(first <= t < last for t in self.controls)


_KEYWORD = re.compile(r"([A-Z]+)(?=\s|$)")
# At most nine digits, so that a flood of digits is no number; the id must stand alone ("#3," is none).
_TARGET = re.compile(r"\s*#([0-9]{1,9})(?=\s|$)")


def _action(completion: _Completion, span: tuple[int, int], module: Module, cut: bool) -> Action | None:
  """The action of one line, or None for a blank line."""
  start, stop = span
  # surrogateescape keeps the bytes of half characters, so that positions in the string lead back to bytes.
  line = completion.raw[start:stop].decode("utf-8", "surrogateescape")
  first, last = completion.tokens(start, stop)
  control = completion.has_control(first, last)
  if not line.strip() and not control:
    return None
  op, targets, text, reason = _read(line, module)
  if control:
    op, targets, text, reason = None, (), "", Reason.NOT_AN_ACTION
  if cut:
    reason = Reason.UNFINISHED
  text_first, text_last = first, first
  if text:
    at = start + len(line[: len(line.rstrip()) - len(text)].encode("utf-8", "surrogateescape"))
    text_first, text_last = completion.tokens(at, at + len(text.encode("utf-8", "surrogateescape")))
  ids = completion.ids[text_first:text_last]
  return Action(op, targets, _view(text), ids, text_first, text_last, reason, _view(line.strip()), first, last)


def _read(line: str, module: Module) -> tuple[Op | None, tuple[int, ...], str, Reason]:
  """Operation, targets, text and reason of one line."""
  line = line.strip()
  keyword = _KEYWORD.match(line)
  if keyword is None or keyword[1] not in Op.__members__:
    return None, (), "", Reason.NOT_AN_ACTION
  op = Op(keyword[1])
  targets, at = _read_targets(op, line, keyword.end())
  text = line[at:].strip()
  return op, targets, text, _reason(op, targets, text, module)


def _read_targets(op: Op, line: str, at: int) -> tuple[tuple[int, ...], int]:
  """The ids that `op` takes from position `at`, and where the text begins: a later "#5" is part of the text."""
  most = len(line) if op == Op.MERGE else int(op in _ONE_TARGET)
  targets: list[int] = []
  while len(targets) < most and (match := _TARGET.match(line, at)):
    targets.append(int(match[1]))
    at = match.end()
  return tuple(dict.fromkeys(targets)), at


def _reason(op: Op, targets: tuple[int, ...], text: str, module: Module) -> Reason:
  if op in _NO_TEXT and text and (targets or op not in _ONE_TARGET):
    return Reason.NOT_AN_ACTION
  if op not in OPERATIONS[module]:
    return Reason.WRONG_MODULE
  if (op in _ONE_TARGET and not targets) or (op == Op.MERGE and len(targets) < 2):
    return Reason.WRONG_TARGETS
  if op not in _NO_TEXT and not text:
    return Reason.EMPTY_TEXT
  return Reason.OK


def _view(text: str) -> str:
  return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
