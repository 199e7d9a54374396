"""Which parts of a text an answer leaned on, for any text and any model that is supported: no training, no bank.

    found = attribute("Ann lives in Lisbon.\\nBob plays chess.", "Where does Ann live?")
    found.top()          # [(" Lisbon", 5.1), …]
    found.save("out")    # attribution.json and attribution.html

The text is ablated in `sources`: its tokens, words, sentences, records (lines), or parts that the caller gives.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from attrimem_jax import checks
from attrimem_jax.agent import DTYPES, check_attribution, check_model, check_prompts, own_prompts
from attrimem_jax.attribution import attribute as attributions
from attrimem_jax.attribution.attribute import Attribution, Problem
from attrimem_jax.attribution.faithfulness import Faithfulness
from attrimem_jax.io import models
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.memory.context import Context, Source, answer_prefix, answer_suffix
from attrimem_jax.memory.prompts import Prompts
from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.rollout.answering import Reader, sample_answers
from attrimem_jax.text.chat import Chat
from attrimem_jax.text.spans import find, offsets, pieces
from attrimem_jax.types import CallKey, Module, Question, Record
from attrimem_jax.view import html

UNITS = ("token", "word", "sentence", "record")
_PATTERNS = {
  "word": re.compile(r"[^\S\n]*(?:[぀-ヿ㐀-䶿一-鿿]|[^\s぀-ヿ㐀-䶿一-鿿]+)|\s+"),
  "sentence": re.compile(r"[^\n]+?(?:[.!?](?=\s)|[。！？]|(?=\n)|$)\s*|\s+"),
  "record": re.compile(r"[^\n]*\n+|[^\n]+$"),
}
_TOP = (1, 4, 16)
_STEP = 64  # lengths are padded to multiples of it, so that question after question compiles few programs


def make_folder(folder: str | pathlib.Path) -> pathlib.Path:
  """The folder, made if there is none.

  Raises:
    ValueError: it cannot be made or written to.
  """
  folder = pathlib.Path(os.path.expanduser(folder))
  try:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
      raise PermissionError(0, "it may not be written to")
  except (OSError, ValueError) as error:
    raise _unwritable(folder, error) from None
  return folder


def _unwritable(folder: pathlib.Path, error: Exception) -> ValueError:
  reason = getattr(error, "strerror", None) or error
  return ValueError(f"cannot save to {str(folder)!r} ({reason}): give another folder")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explained:
  """Weights of the parts of a text for one answer.

  Attributes:
    question, answer: what was asked, and the answer that is explained.
    part: the words of the answer that are explained; "" for all of it.
    ids, source: int32 [T], the text's tokens and the part that each belongs to, or -1.
    parts: S of them, as text.
    attribution: the measurements, and weights float32 [S]: the logits of the answer's probability that a part adds.
    faithfulness: how far the weights can be believed, on masks that they were not fitted to.
    scorer: how masked parts were kept from the answer.
    tokens_read: by the model, for measuring and for judging.
    pieces: bytes of each token.
  """

  question: str
  answer: str
  part: str
  ids: np.ndarray
  source: np.ndarray
  parts: tuple[str, ...]
  attribution: Attribution
  faithfulness: Faithfulness
  scorer: str
  tokens_read: int
  pieces: tuple[bytes, ...]

  @property
  def weights(self) -> np.ndarray:
    return self.attribution.weights

  def top(self, count: int = 5) -> list[tuple[str, float]]:
    """The parts of largest magnitude with their weights; zeros are left out."""
    checks.whole("count of top", count, 0)
    order = np.argsort(-np.abs(self.weights), kind="stable")[:count]
    return [(self.parts[i], float(self.weights[i])) for i in order if self.weights[i]]

  def to_dict(self) -> dict[str, Any]:
    """Everything, as plain data."""
    judged, measured = self.faithfulness, self.attribution.measured
    return {
      "question": self.question,
      "answer": self.answer,
      "part": self.part,
      "answer_ids": self.attribution.problem.answer.tolist(),
      "ids": self.ids.tolist(),
      "source": self.source.tolist(),
      "parts": [{"text": t, "weight": float(w)} for t, w in zip(self.parts, self.weights, strict=True)],
      "intercept": self.attribution.intercept,
      "faithfulness": {
        "lds": judged.lds,
        "r2": judged.r2,
        "drops": {str(k): drop for k, drop in judged.drops.items()},
        "held_out_masks": judged.masks,
      },
      "gap": self.attribution.gap,
      "gradients": len(measured.gradients.levels) if measured.gradients else 0,
      "masks": len(measured.masks),
      "scorer": self.scorer,
      "tokens_read": self.tokens_read,
    }

  def save(self, folder: str | pathlib.Path) -> pathlib.Path:
    """Writes attribution.json and attribution.html, one page that needs no other file; returns the page's path.

    Raises:
      ValueError: there is no such folder and none can be made, or it cannot be written to.
    """
    if not isinstance(folder, str | pathlib.Path):
      raise ValueError(f"folder of save is {checks.shown(folder)}: give a path")
    folder = make_folder(folder)
    page = folder / "attribution.html"
    text = html.document(self.question, f"<h1>{html.escape(self.question)}</h1>{self._body()}")
    try:
      (folder / "attribution.json").write_text(
        json.dumps(self.to_dict(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
      )
      page.write_text(text, encoding="utf-8")
    except OSError as error:
      raise _unwritable(folder, error) from None
    return page

  def _repr_html_(self) -> str:
    return html.card(self.question, self._body())

  def __repr__(self) -> str:
    lines = [f"{weight:+8.3f}  {text!r}" for text, weight in self.top()]
    return "\n".join([f"{self.question}\n→ {self.answer}{self._only()}", *lines, self._summary()])

  def _only(self) -> str:
    return f"  (of this: {self.part!r})" if self.part else ""

  def _body(self) -> str:
    scale = html.largest(self.weights.tolist())
    weights = [float(self.weights[s]) if s >= 0 else None for s in self.source]
    meaning = {"up": "made this answer likelier", "down": "made it less likely", "none": "never removed"}
    text = html.box(html.tokens(self.pieces, weights, scale=scale, name="attribution"))
    rows = [(html.escape(part.strip() or repr(part)), f"{weight:+.3f}") for part, weight in self.top(10)]
    note = f'<p class="note" style="color:#555">{html.escape(self._summary())}</p>'
    return (
      html.said(self.answer, self._only())
      + html.legend(scale, **meaning)
      + text
      + html.table(("strongest parts", "weight"), rows)
      + note
    )

  def _summary(self) -> str:
    judged, measured = self.faithfulness, self.attribution.measured
    drops = ", ".join(f"{drop:.2f} nats without the top {k}" for k, drop in sorted(judged.drops.items()))
    gap = "" if measured.gradients else f", duality gap {self.attribution.gap:.1e}"
    return (
      f"On {judged.masks} held-out masks: rank correlation {judged.lds:.2f}, R² {judged.r2:.2f}. Log-probability falls "
      f"by {drops}. {measured} ({self.scorer}), {self.tokens_read:,} tokens read{gap}."
    )


def attribute(
  context: str | Sequence[str],
  question: str,
  answer: str | None = None,
  *,
  model: str | LanguageModel = "embedded:answer",
  sources: str | Sequence[str] = "token",
  prompts: Prompts | None = None,
  gradients: int = 5,
  masks: int | None = None,
  scorer: str | None = None,
  penalty: str = "held_out",
  alpha: float = 0.01,
  keep: float = 0.5,
  held_out: int = 16,
  max_new_tokens: int = 64,
  seed: int = 0,
  dtype: str = "float32",
  part: str = "",
) -> Explained:
  """Explains an answer by the text that it was given from.

  Args:
    context: the text, or its records, which are put on a line each.
    question: what is asked about it.
    answer: the answer to explain; None takes what the model says.
    model: the answer model: what `io.models.load` takes, or a model that is loaded already.
    sources: "token", "word", "sentence", "record" (a line), or the parts themselves, which must join to the text.
    prompts: the words around text and question; None takes those the model was made for.
    gradients: at how many levels of faintness, 1 to 5, derivatives by every part are taken; 0 fits a LASSO to random
      masks instead.
    masks: contexts with random parts left out under which the answer is scored; None takes 8, which give gradients
      their scale, and 256 without gradients.
    scorer: "exact" removes parts from the text (not with gradients), "masked" hides them, "cached" hides them in one
      reading of the text; None is masked with gradients and cached without.
    penalty, alpha: of the LASSO (`attribution.lasso.Penalty`).
    keep: probability that a part stays.
    held_out: masks that only judge the result; they are scored exactly whatever the scorer.
    max_new_tokens: of an answer that the model gives.
    seed: of the masks, 0 to 2³² - 1.
    dtype: of the computation.
    part: explains only these words of the answer, given those before them; "" explains the whole.

  Raises:
    ValueError: an empty text, question or answer; a part that does not stand in the answer; sources that do not join to
      the text; text that is no Unicode; more tokens than the model reads; an argument that is out of range.
  """
  text = _context(context)
  asked = Question("asked", checks.text("the question", question, empty=False), (), "")
  if answer is not None:
    checks.text("the answer", answer, empty=False)
  check_model("model of attribute", model)
  check_prompts(prompts)
  _check_sources(sources)
  masks, scorer = check_attribution(
    "attribute",
    gradients=gradients,
    masks=masks,
    scorer=scorer,
    keep=keep,
    penalty=penalty,
    alpha=alpha,
    seed=seed,
  )
  checks.whole("held_out of attribute", held_out, 2)
  checks.whole("max_new_tokens of attribute", max_new_tokens, 1)
  checks.choice("dtype of attribute", dtype, DTYPES)
  checks.text("part of attribute", part)
  loaded = model if isinstance(model, LanguageModel) else models.load(str(model))
  chat = Chat(loaded.tokenizer)
  prompts = prompts or own_prompts(loaded)
  ids = np.array(chat.tokenizer.encode(text), np.int32)
  tokens = chat.tokenizer.pieces(ids)
  source, parts = _sources(tokens, sources)
  owner = CallKey("text", 0, 0, Module.SEMANTIC)
  owned = tuple(Source(owner, i) for i in range(len(parts)))
  record = Record(1, Module.SEMANTIC, text, tuple(ids.tolist()))
  prompt, places = answer_suffix(chat, prompts, Context(ids, source, owned, (record,)), asked)
  header = answer_prefix(chat, prompts)
  if answer is None:
    reader = Reader(loaded, prompts, Bm25(), max_new_tokens=max_new_tokens, dtype=dtype, step=_STEP)
    said = sample_answers(reader, header, [prompt])[0].ids
    if not len(said):
      raise ValueError("the model gave an empty answer: pass the answer that is to be explained")
  else:
    said = np.array(chat.completion(answer), np.int32)
  problem = Problem(prompt, places, owned, said, (seed,))
  if part:
    problem = attributions.part_of(problem, *find(chat.tokenizer.pieces(said), part))
  measured = attributions.measure(
    loaded, header, [problem], masks, gradients=gradients, keep=keep, scorer=scorer, dtype=dtype, step=_STEP
  )
  (found,) = attributions.fit(measured, alpha=alpha, penalty=penalty)
  (judged,) = attributions.judge(loaded, header, [found], held_out, top=_TOP, keep=keep, dtype=dtype, step=_STEP)
  read = attributions.price(header, measured[0], scorer)
  read += attributions.tokens_read(header, problem, np.ones((held_out + len(_TOP) + 1, len(parts)), bool))
  return Explained(question, chat.said(said), part, ids, source, parts, found, judged, scorer, read, tuple(tokens))


def _context(context: object) -> str:
  if isinstance(context, Sequence) and not isinstance(context, str | bytes):
    context = "\n".join(checks.text(f"record {i} of the context", record) for i, record in enumerate(context))
  return checks.text("the context", context, empty=False)


def _check_sources(sources: object) -> None:
  if isinstance(sources, str):
    checks.choice("sources", sources, UNITS)
  elif isinstance(sources, Sequence) and not isinstance(sources, bytes):
    for i, part in enumerate(sources):
      checks.text(f"part {i} of sources", part)
  else:
    raise ValueError(f"sources is {checks.shown(sources)}: use one of {', '.join(UNITS)}, or a list of parts")


def _sources(tokens: Sequence[bytes], sources: str | Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
  """The part of each token, int32 [T] with -1 for line breaks between tokens or words, and the texts of the parts."""
  if sources == "token":
    shown = [piece.text for piece in pieces(tokens) for _ in range(piece.start, piece.stop)]
    return _numbered([i if token.strip(b"\n\r") else -1 for i, token in enumerate(tokens)], shown)
  text = b"".join(tokens).decode(errors="replace")
  if isinstance(sources, str):
    parts = _PATTERNS[sources].findall(text)
  else:
    parts = list(sources)
    _require_tiles(parts, text)
  stops = list(itertools.accumulate(len(part.encode()) for part in parts))
  starts = [start for start, _ in offsets(tokens)]
  part_of = np.searchsorted(stops, starts, side="right")
  blank = [sources == "word" and not token.strip(b"\n\r") for token in tokens]
  return _numbered([-1 if skip else int(part) for part, skip in zip(part_of, blank, strict=True)], parts)


def _numbered(part_of: Sequence[int], texts: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
  """Numbers the parts that own a token 0, 1, … in order; a part inside of another's token has none and is left out."""
  used = sorted({part for part in part_of if part >= 0})
  number = {part: i for i, part in enumerate(used)}
  return np.array([number.get(part, -1) for part in part_of], np.int32), tuple(texts[part] for part in used)


def _require_tiles(parts: Sequence[str], text: str) -> None:
  joined = "".join(parts)
  if joined != text:
    at = next((i for i, (a, b) in enumerate(zip(joined, text, strict=False)) if a != b), min(len(joined), len(text)))
    raise ValueError(
      f"the parts do not join to the text: they hold {joined[at : at + 20]!r} at character {at}, the text "
      f"{text[at : at + 20]!r}"
    )
