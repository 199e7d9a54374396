"""Colours, lines, escaping and half characters of `view.html`, and the charts."""

import re
import xml.dom.minidom

import pytest

from attrimem_jax.view import html
from attrimem_jax.view.charts import Series, line_chart, ticks


def _spans(rendered):
  return re.findall(r'<span style="([^"]*)"(?: title="([^"]*)")?>(.*?)</span>', rendered, re.DOTALL)


def test_a_weight_shows_as_tint_and_as_line():
  up, down, zero, none = _spans(html.tokens([b"a", b"b", b"c", b"d"], [2.0, -1.0, 0.0, None]))
  assert "solid rgb(33,102,172)" in up[0]
  assert "dashed rgb(179,88,6)" in down[0]
  assert "background" not in zero[0]
  assert html.GREY in none[0]
  assert (up[1], down[1], zero[1], none[1]) == ("weight +2", "weight -1", "weight +0", "")


def test_half_of_the_scale_is_tinted_by_hand():
  """0.06 + 0.5 · 0.5 = 0.31 of blue on white: 255 - 0.31 · (255 - 33, 102, 172) = 186, 208, 229; a line of 2 px."""
  ((style, _, _),) = _spans(html.tokens([b"a"], [0.5], scale=1.0))
  assert style == "color:#111;background:rgb(186,208,229);border-bottom:2px solid rgb(33,102,172)"


def test_text_is_escaped_everywhere():
  bad = '<script>"&'
  for rendered in (
    html.tokens([bad.encode()], [1.0], name=bad),
    html.legend(1.0, up=bad, down=bad, none=bad),
    html.card(bad, ""),
    html.table([bad], []),
    html.document(bad, ""),
    line_chart(bad, [Series(bad, [1], [1])], bad),
  ):
    assert "<script>" not in rendered
    assert "&lt;script&gt;&quot;&amp;" in rendered


def test_tokens_with_parts_of_one_character_share_a_span():
  parrot = "🦜".encode()
  (whole,) = _spans(html.tokens([parrot[:1], parrot[1:3], parrot[3:]], [1.0, None, 0.5]))
  assert whole[1:] == ("weight +1, +0.5", "🦜")


def test_an_unfinished_character_and_a_line_break_stay_visible():
  assert [s[2] for s in _spans(html.tokens([b"a\n", "é".encode()[:1]], [None, None]))] == [
    "a↵\n",
    "\N{REPLACEMENT CHARACTER}",
  ]


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [None, None], [float("nan"), float("inf")]])
def test_degenerate_weights(weights):
  rendered = html.tokens([b"x"] * len(weights), weights)
  assert len(_spans(rendered)) == len(weights)
  assert "nan" not in rendered


def test_black_text_is_readable_on_the_strongest_tints():
  for sign in (1.0, -1.0):
    ((style, _, _),) = _spans(html.tokens([b"a"], [sign]))
    channels = [int(c) / 255 for c in re.search(r"background:rgb\((\d+),(\d+),(\d+)\)", style).groups()]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / (0.0056 + 0.05) > 5.5  # WCAG contrast with #111; AA asks for 4.5


@pytest.mark.parametrize(
  ("low", "high", "expected"),
  [
    (0.12, 0.48, [0.1, 0.2, 0.3, 0.4, 0.5]),
    (0, 10, [0, 2, 4, 6, 8, 10]),
    (-3, 4, [-4, -2, 0, 2, 4]),
  ],
)
def test_ticks(low, high, expected):
  assert ticks(low, high) == expected


def test_steps_are_whole_numbers():
  assert ticks(0, 2, least=1.0) == [0, 1, 2]


def test_a_legend_without_weights_says_so():
  assert "Nothing here has a weight." in html.legend(0.0, up="a", down="b", none="c")


@pytest.mark.parametrize("value", [0.0, 1.0, -1e9, 1e-12])
def test_ticks_of_one_value_surround_it(value):
  found = ticks(value, value)
  assert found[0] <= value <= found[-1]
  assert len(found) > 1


def test_a_chart_is_well_formed_and_says_in_words_what_it_shows():
  chart = line_chart(
    "Reward & more",
    [Series("dots", [0, 1], [0.1, 0.4], [0, 0.3], [0.2, 0.5]), Series("line", [0, 1], [0.1, 0.4], line=True)],
  )
  root = xml.dom.minidom.parseString(chart).documentElement
  assert root.getAttribute("aria-label") == "Reward & more: dots from 0.1 to 0.4; line from 0.1 to 0.4"
  assert len(root.getElementsByTagName("circle")) == 2 + 1  # and one in the key


def test_charts_of_one_point_and_of_none():
  assert xml.dom.minidom.parseString(line_chart("one", [Series("s", [3], [0.5], line=True)]))
  assert line_chart("none", [Series("s", [], [])]) == ""
