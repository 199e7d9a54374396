"""Bytes of tokens: what each token covers, which tokens form whole characters, which tokens a byte span touches.

Byte-level tokens may end inside a character ("🦜" is several tokens of the Qwen vocabulary, none of them a character),
so positions are counted in bytes and text is only cut where whole characters end.
"""

import bisect
import codecs
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
  """The tokens [start, stop) and the characters they form together."""

  start: int
  stop: int
  text: str


def offsets(tokens: Sequence[bytes]) -> list[tuple[int, int]]:
  """Byte range [start, stop) of each token in their concatenation. [b"ab", b"c"] → [(0, 2), (2, 3)]."""
  spans, position = [], 0
  for token in tokens:
    spans.append((position, position + len(token)))
    position += len(token)
  return spans


def pieces(tokens: Sequence[bytes]) -> list[Piece]:
  """The shortest runs of tokens that end where a character ends.

  The texts join to the decoded whole; invalid bytes, and an unfinished character at the end, become U+FFFD.
  """
  decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
  found, first, text = [], 0, ""
  for i, token in enumerate(tokens):
    text += decoder.decode(token, final=i + 1 == len(tokens))
    if not decoder.getstate()[0]:
      found.append(Piece(first, i + 1, text))
      first, text = i + 1, ""
  return found


def align(one: Sequence[bytes], other: Sequence[bytes]) -> list[tuple[slice, slice]]:
  """The shortest runs of tokens of both that cover the same bytes, in order; as a whole both cover the same bytes.

  [b"ab", b"c"] and [b"a", b"b", b"c"] → [(0:1, 0:2), (1:2, 2:3)].
  """
  ends = [[stop for _, stop in offsets(tokens)] for tokens in (one, other)]
  assert [end[-1:] for end in ends] in ([[], []], [ends[0][-1:]] * 2), "the tokens cover different bytes"
  found, starts = [], [0, 0]
  for end in sorted(set(ends[0]) & set(ends[1])):
    stops = [bisect.bisect_right(stop, end) for stop in ends]
    found.append((slice(starts[0], stops[0]), slice(starts[1], stops[1])))
    starts = stops
  return found


def find(tokens: Sequence[bytes], text: str) -> tuple[int, int]:
  """Token range [i, j) of the first place where `tokens` say `text`, with the tokens that hold its ends as a whole.

  Raises:
    ValueError: they do not say it.
  """
  start = b"".join(tokens).find(text.encode())
  if not text or start < 0:
    raise ValueError(f"{text!r} does not stand in {b''.join(tokens).decode(errors='replace')!r}")
  return overlap(offsets(tokens), start, start + len(text.encode()))


def overlap(spans: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
  """Token range [i, j) that shares at least one byte with the byte span [start, stop).

  `spans` are consecutive, as `offsets` gives them. An empty span gives an empty range at the token where it lies.
  """
  i = bisect.bisect_right(spans, start, key=lambda span: span[1])
  j = bisect.bisect_left(spans, stop, key=lambda span: span[0])
  return i, max(i, j) if start < stop else i
