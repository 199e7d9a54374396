"""ChatML prompts as ids.

    <|im_start|>role\\n text <|im_end|>\\n … <|im_start|>assistant\\n

A prompt is put together from control ids and from the ids of plain text, never rendered to a string and encoded
again, so text cannot open or close a message. The parts are encoded one by one; the result equals transformers'
`apply_chat_template` unless a text begins with white space (which that one may merge with the line break before it).
Default system messages that some templates invent are left out: what the caller passes is what the model reads.

Qwen3 has three kinds of models, told apart by their template: hybrid ones, which think unless the prompt holds an empty
think block; ones that only think; ones that never do.
"""

import enum
from collections.abc import Iterable, Sequence

from attrimem_jax.text.tokenizer import Tokenizer


class Thinking(enum.StrEnum):
  """What a model's chat template says about reasoning before the reply."""

  NEVER = "never"
  HYBRID = "hybrid"
  ALWAYS = "always"


def thinking_of(tokenizer: Tokenizer) -> Thinking:
  """Reads the kind of model off its template, or off its vocabulary where no template came with it."""
  if not tokenizer.has_control("<think>") or not tokenizer.has_control("</think>"):
    return Thinking.NEVER
  template = tokenizer.chat_template
  if template is None or "enable_thinking" in template:
    return Thinking.HYBRID
  reply = template.rpartition("add_generation_prompt")[2]
  return Thinking.ALWAYS if "<think>" in reply else Thinking.NEVER


class Chat:
  """Builds the ids of messages for one tokenizer.

  Args:
    tokenizer: of a model that was trained on ChatML.
    thinking: False closes an empty think block before the reply of a hybrid model, True lets the model think, None does
      what the model's template does when nothing is said.

  Raises:
    ValueError: the template is not ChatML, or the model cannot do what `thinking` asks.
  """

  def __init__(self, tokenizer: Tokenizer, thinking: bool | None = False):
    template = tokenizer.chat_template
    if template is not None and "<|im_start|>" not in template:
      raise ValueError(
        f"the chat template of {tokenizer.source} is not ChatML (it has no <|im_start|>): {template[:60]!r}…; "
        "choose a Qwen or SmolLM2 model, or one trained by this project"
      )
    self.tokenizer = tokenizer
    self._start, self._end = tokenizer.control("<|im_start|>"), tokenizer.control("<|im_end|>")
    self._kind = thinking_of(tokenizer)
    self._header = tuple(self._think_header(thinking))

  def open(self, role: str) -> list[int]:
    """`<|im_start|>role\\n`: what follows is the message's text."""
    return [self._start, *self.tokenizer.encode(role + "\n")]

  def close(self) -> list[int]:
    """`<|im_end|>\\n`."""
    return [self._end, *self.tokenizer.encode("\n")]

  def reply(self) -> list[int]:
    """Closes the open message and opens the assistant's, up to where its completion starts."""
    return [*self.close(), *self.open("assistant"), *self._header]

  def message(self, role: str, text: str) -> list[int]:
    """One whole message. Thoughts of an assistant's past message are left out, as the models' own templates do."""
    if role == "assistant" and self._kind is not Thinking.NEVER:
      text = text.rpartition("</think>")[2].lstrip("\n")
    return [*self.open(role), *self.tokenizer.encode(text), *self.close()]

  def messages(self, messages: Sequence[tuple[str, str]]) -> list[int]:
    """Whole messages, one after the other, each a (role, text) pair."""
    return [token for role, text in messages for token in self.message(role, text)]

  def prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
    """Whole messages, then the start of the assistant's reply."""
    return [*self.messages(messages), *self.open("assistant"), *self._header]

  def completion(self, text: str) -> list[int]:
    """A whole reply as a model would have sampled it: the text and the first stop token."""
    return [*self.tokenizer.encode(text), self.tokenizer.stop_ids[0]]

  def said(self, ids: Iterable[int]) -> str:
    """The text of a completion, without its stop token and the blanks around it."""
    return self.tokenizer.decode([i for i in ids if i not in self.tokenizer.stop_ids]).strip()

  def _think_header(self, thinking: bool | None) -> list[int]:
    """What stands between `assistant\\n` and the completion."""
    if self._kind is Thinking.NEVER:
      if thinking:
        raise ValueError(
          f"thinking=True, but {self.tokenizer.source} has no think tokens or a template that never uses them; "
          "set thinking to False or choose a model that thinks"
        )
      return []
    tokenizer = self.tokenizer
    opened, closed = tokenizer.control("<think>"), tokenizer.control("</think>")
    if self._kind is Thinking.HYBRID:
      blank = tokenizer.encode("\n\n")
      return [opened, *blank, closed, *blank] if thinking is False else []
    if thinking is False:
      raise ValueError(
        f"thinking=False, but the template of {tokenizer.source} always thinks; set thinking to None or True, "
        "or choose the hybrid or the instruct variant of the model"
      )
    return [opened, *tokenizer.encode("\n")]
