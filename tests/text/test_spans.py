"""Characters are only cut where they end, and byte spans find their tokens."""

import itertools
import random

import numpy as np
import pytest

from attrimem_jax.text import spans
from attrimem_jax.text.tokenizer import Tokenizer


def test_offsets():
  assert spans.offsets([b"ab", b"", b"c"]) == [(0, 2), (2, 2), (2, 3)]
  assert spans.offsets([]) == []


def test_pieces_of_an_emoji(tokenizer: Tokenizer):
  tokens = tokenizer.pieces(tokenizer.encode("I love 🦜"))
  found = spans.pieces(tokens)
  assert "".join(piece.text for piece in found) == "I love 🦜"
  assert found[-1] == spans.Piece(len(tokens) - 3, len(tokens), "🦜")


@pytest.mark.parametrize(
  ("tokens", "expected"),
  [
    ([], []),
    ([b"a", b"\xf0\x9f"], [(0, 1, "a"), (1, 2, "�")]),
    ([b"\xf0\x9f", b"a"], [(0, 2, "�a")]),
    ([b"\xff", b"a"], [(0, 1, "�"), (1, 2, "a")]),
    ([b"x\xe6", b"\x97", b"\xa5\xe6", b"\x9c\xac"], [(0, 4, "x日本")]),
    ([b"\xe2", b"\x98", b"\x83!", b"?"], [(0, 3, "☃!"), (3, 4, "?")]),
  ],
)
def test_pieces_by_hand(tokens: list[bytes], expected: list):
  assert [(piece.start, piece.stop, piece.text) for piece in spans.pieces(tokens)] == expected


def test_pieces_cover_any_bytes_in_order():
  draw = random.Random(0)
  for _ in range(300):
    tokens = [draw.randbytes(draw.randint(0, 3)) for _ in range(draw.randint(0, 8))]
    tokens += ["é日🦜"[draw.randrange(3)].encode()[: draw.randint(1, 4)]]
    found = spans.pieces(tokens)
    assert [piece.start for piece in found] + [len(tokens)] == [0] + [piece.stop for piece in found]
    assert "".join(piece.text for piece in found) == b"".join(tokens).decode(errors="replace")


@pytest.mark.parametrize(
  ("span", "expected"),
  [
    ((0, 6), (0, 3)),
    ((0, 1), (0, 1)),
    ((1, 3), (0, 2)),
    ((2, 4), (1, 2)),
    ((5, 6), (2, 3)),
    ((6, 6), (3, 3)),
    ((3, 3), (1, 1)),
  ],
)
def test_overlap(span: tuple[int, int], expected: tuple[int, int]):
  assert spans.overlap([(0, 2), (2, 4), (4, 6)], *span) == expected


def test_overlap_agrees_with_the_definition():
  draw = random.Random(1)
  for _ in range(200):
    ranges = spans.offsets([b"x" * draw.randint(1, 4) for _ in range(draw.randint(1, 9))])
    start = draw.randrange(ranges[-1][1])
    stop = draw.randint(start + 1, ranges[-1][1])
    touched = [i for i, (a, b) in enumerate(ranges) if a < stop and b > start]
    assert spans.overlap(ranges, start, stop) == (touched[0], touched[-1] + 1)


@pytest.mark.parametrize(
  ("one", "other", "expected"),
  [
    ([], [], []),
    ([b"ab"], [b"ab"], [((0, 1), (0, 1))]),
    ([b"ab", b"c"], [b"a", b"b", b"c"], [((0, 1), (0, 2)), ((1, 2), (2, 3))]),
    ([b"ab", b"cd"], [b"a", b"bc", b"d"], [((0, 2), (0, 3))]),
  ],
)
def test_align_by_hand(one, other, expected):
  assert [((a.start, a.stop), (b.start, b.stop)) for a, b in spans.align(one, other)] == expected


def test_aligned_runs_are_the_shortest_that_cover_the_same_bytes():
  rng = np.random.default_rng(0)
  for _ in range(200):
    text = bytes(rng.integers(97, 123, int(rng.integers(1, 30))).astype(np.uint8))
    one, other = (_cut_at_random(rng, text) for _ in range(2))
    runs = spans.align(one, other)
    assert b"".join(b"".join(one[a]) for a, _ in runs) == text
    for a, b in runs:
      assert b"".join(one[a]) == b"".join(other[b])
      inner = [{sum(map(len, part[:i])) for i in range(1, len(part))} for part in (one[a], other[b])]
      assert not inner[0] & inner[1]


def _cut_at_random(rng, text):
  cuts = [0, *sorted(set(rng.integers(1, len(text) + 1, 5).tolist()) | {len(text)})]
  return [text[a:b] for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize(("text", "expected"), [("ab", (0, 2)), ("c", (1, 2)), ("bcd", (1, 3)), ("d", (2, 3))])
def test_find_takes_whole_tokens(text, expected):
  assert spans.find([b"a", b"bc", b"d"], text) == expected


@pytest.mark.parametrize("text", ["", "x", "ac"])
def test_find_says_what_is_missing(text):
  with pytest.raises(ValueError, match=f"'{text}' does not stand in 'abcd'"):
    spans.find([b"a", b"bc", b"d"], text)
