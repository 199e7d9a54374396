"""Lists of token ids to padded arrays on the shared-prefix layout, in a bounded set of shapes."""

from collections.abc import Iterator, Sequence

import numpy as np

from attrimem_jax.nn.decoder import Shared

Ids = Sequence[int] | np.ndarray


def bucket(length: int, step: int = 16) -> int:
  """The padded width for `length` tokens: multiples of `step` up to 8 steps, then powers of two times `step`.

  A run therefore meets few different shapes, and compiles few programs: bucket(5) is 16, bucket(100) is 112,
  bucket(130) is 192 and bucket(300) is 384 (three quarters of a power count as well).
  """
  blocks = max(1, -(-length // step))
  if blocks <= 8:
    return blocks * step
  power = 1 << (blocks - 1).bit_length()
  return step * (power * 3 // 4 if blocks <= power * 3 // 4 else power)


def pack(
  prefixes: Sequence[Ids],
  suffixes: Sequence[Sequence[tuple[Ids, Ids]]],
  *,
  prefix_width: int | None = None,
  prompt_width: int | None = None,
  completion_width: int | None = None,
  rows: int | None = None,
  step: int = 16,
) -> Shared:
  """Packs P prefixes, each with a list of (prompt, completion) suffixes, into NumPy arrays.

  Widths default to the bucket of the longest; `rows` (n) defaults to the longest list. Missing rows are all padding.
  The completions are the last `completion_width` columns.

  Raises:
    ValueError: a prefix is empty, or a row has neither prompt nor completion token to predict from.
  """
  if any(len(prefix) == 0 for prefix in prefixes):
    raise ValueError("an empty prefix cannot be shared: give every prompt at least one leading token")
  everything = [row for group in suffixes for row in group]
  prefix_width = prefix_width or bucket(max(map(len, prefixes)), step)
  prompt_width = prompt_width or bucket(max(len(prompt) for prompt, _ in everything), step)
  if completion_width is None:
    completion_width = bucket(max(len(completion) for _, completion in everything), step)
  rows = rows or max(map(len, suffixes))
  P, Ts = len(prefixes), prompt_width + completion_width
  prefix, prefix_mask = np.zeros((P, prefix_width), np.int32), np.zeros((P, prefix_width), bool)
  suffix, suffix_mask = np.zeros((P, rows, Ts), np.int32), np.zeros((P, rows, Ts), bool)
  for p, ids in enumerate(prefixes):
    prefix[p, : len(ids)], prefix_mask[p, : len(ids)] = ids, True
    for i, (prompt, completion) in enumerate(suffixes[p]):
      if len(prompt) == 0:
        raise ValueError(
          f"row {i} of prefix {p} has an empty prompt: its first completion token has no column before it"
        )
      cells = slice(prompt_width - len(prompt), prompt_width + len(completion))
      suffix[p, i, cells], suffix_mask[p, i, cells] = np.concatenate([prompt, completion]), True
  return Shared(prefix, prefix_mask, suffix, suffix_mask)


def batches(
  widths: Sequence[tuple[int, int]], token_budget: int, few: int = 32
) -> Iterator[tuple[tuple[int, int], int, list[int]]]:
  """Cuts rows of (completion width, prompt width) into batches of few shapes.

  Yields ((completion width, prompt width), rows of the batch, indices of the rows that fill it).

  A batch has a quarter of `few` rows, or 4, 16, ... times as many. Fewer than `few` move up to the next width: for a
  small model padding them costs less than a program of their own. Only the widest batch has empty rows.
  """
  completion_widths = sorted({completion_width for completion_width, _ in widths})
  waiting: list[int] = []
  for completion_width in completion_widths:
    # Rows left over from narrower completions queue again by the width of their prompts.
    queue = waiting + [i for i, width in enumerate(widths) if width[0] == completion_width]
    prompt_widths = sorted({widths[i][1] for i in queue})
    waiting = []
    for prompt_width in prompt_widths:
      waiting += [i for i in queue if widths[i][1] == prompt_width]
      last = (completion_width, prompt_width) == (completion_widths[-1], prompt_widths[-1])
      while waiting and (last or len(waiting) >= few):
        rows = batch_size(len(waiting), token_budget // (completion_width + prompt_width), least=few // 4)
        yield (completion_width, prompt_width), rows, waiting[:rows]
        waiting = waiting[rows:]


def batch_size(count: int, most: int, least: int = 8) -> int:
  """The largest of `least` times 1, 4, 16, ... that `count` rows fill and `most` allows; never less than `least`."""
  rows = least
  while rows * 4 <= min(count, most):
    rows *= 4
  return rows
