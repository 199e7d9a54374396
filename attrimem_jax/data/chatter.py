"""Small talk of the synthetic world: nothing worth keeping, and how a careless writer would still note it down.

Some lines mention a value ("I saw a film about Lisbon.") to tempt a reader who looks only for familiar words.
"""

import dataclasses

import numpy as np

from attrimem_jax.data import world
from attrimem_jax.types import Module

REPLIES = (
  "I see.", "Noted.", "Good to know.", "Tell me more.", "Thanks for that.",
  "Nice.", "Sure.", "How are you?", "Really?", "Okay.",
)  # fmt: skip
BEFORE = ("Well, hello.", "Long day.", "It rains again.", "Let me think.", "Oh, and one thing.", "Guess what.")
AFTER = ("What a day.", "Anyway, thanks.", "That is all.", "Funny, right?", "So it goes.")


@dataclasses.dataclass(frozen=True)
class Chatter:
  """A line without a fact. `note` is what a careless writer would keep of it, in `module`; `values` fill `{v}`."""

  said: str
  note: str
  module: Module
  values: tuple[str, ...] = ()


LINES = (
  Chatter("The weather is nice.", "{s} says the weather is nice", Module.EPISODIC),
  Chatter("It is so cold outside.", "{s} says it is cold", Module.EPISODIC),
  Chatter("Thanks for the help.", "{s} said thanks", Module.EPISODIC),
  Chatter("I am a bit tired.", "{s} is tired", Module.SEMANTIC),
  Chatter("I have nothing to say.", "{s} has nothing to say", Module.SEMANTIC),
  Chatter("Can you tell me a joke?", "{s} wants a joke", Module.SEMANTIC),
  Chatter("I never know how to cook.", "{s} never knows how to cook", Module.PROCEDURAL),
  Chatter("I always lose my keys.", "{s} always loses the keys", Module.PROCEDURAL),
  Chatter("I saw a film about {v}.", "{s} saw a film about {v}", Module.EPISODIC, world.CITIES),
  Chatter("I heard about the {v}.", "{s} heard about the {v}", Module.EPISODIC, world.PLACES),
  Chatter("I dreamed of a {v}.", "{s} dreamed of a {v}", Module.EPISODIC, world.THINGS),
  Chatter("There was a {v} on TV.", "{s} saw a {v} on TV", Module.EPISODIC, world.JOBS),
  Chatter("People talk about {v} a lot.", "People talk about {v}", Module.SEMANTIC, world.FOODS),
  Chatter("They say {v} is hard.", "{s} says {v} is hard", Module.SEMANTIC, world.LANGUAGES),
  Chatter("A song with the {v} is on.", "A song with the {v} was on", Module.SEMANTIC, world.INSTRUMENTS),
)
_PATTERNS = tuple((line, world.template_pattern(line.said)) for line in LINES)


def say(rng: np.random.Generator) -> str:
  """Returns one line of small talk."""
  line = world.pick(rng, LINES)
  return line.said.format(v=world.pick(rng, line.values)) if line.values else line.said


def careless_note(text: str, user: str) -> tuple[Module, str] | None:
  """Returns (module, text) of the note that a careless writer makes of small talk; None for any other text."""
  for line, pattern in _PATTERNS:
    found = pattern.fullmatch(text)
    if found:
      return line.module, line.note.format(s=user, v=found.groupdict().get("v", ""))
  return None
