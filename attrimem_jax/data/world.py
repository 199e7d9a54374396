"""What people of the synthetic world can tell: attributes, their values and how each is worded.

A `Fact` is (subject, attribute, value). An `Attribute` words it four ways: as its subject tells it, as a friend of the
subject tells it, as the one canonical memory record, and as a vague record that has lost its value. Every value is one
word, and apart from numbers no word is a value of two attributes, so that a record from which a word is missing can
still say what it is about.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from attrimem_jax.types import Module

T = TypeVar("T")


def pick(rng: np.random.Generator, options: Sequence[T]) -> T:
  """Returns one of `options`, each equally likely."""
  return options[int(rng.integers(len(options)))]


def _words(text: str) -> tuple[str, ...]:
  return tuple(text.split())


NAMES = _words("Ann Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Nora Omar Paul")
RELATIONS = _words("friend sister brother cousin boss aunt uncle")
CITIES = _words(
  "Lisbon Porto Rome Milan Paris Lyon Berlin Bonn Vienna Prague Oslo Bergen Lund Turku Riga Kyiv Cairo Tunis Accra "
  "Lagos Lima Quito Bogota Havana Boston Dallas Denver Austin Miami Tokyo Osaka Seoul Busan Delhi Mumbai Perth Sydney "
  "Dublin Cork Leeds"
)
JOBS = _words(
  "baker nurse pilot tailor farmer barber judge lawyer doctor dentist chef cook waiter painter plumber miner sailor "
  "soldier singer dancer writer poet banker butcher grocer guard clerk driver builder mason roofer monk florist vet "
  "teacher tutor clown spy chemist welder"
)
PETS = _words(
  "Rex Fido Buddy Coco Daisy Socks Simba Felix Luna Bella Rocky Milo Oreo Nemo Pluto Gizmo Ziggy Toby Lucky Misty "
  "Shadow Smokey Whiskers Boots Patch Sparky Rusty Snoopy Bambi Dumbo"
)
COLOURS = _words(
  "red blue green yellow black white grey brown pink purple gold silver beige teal navy maroon amber lilac violet "
  "cream bronze copper tan mauve crimson khaki coral ruby ivory cyan"
)
ALLERGENS = _words(
  "eggs wheat soy shrimp crab pollen dust cats dogs bees wasps latex nickel mold wool feathers celery mustard sesame "
  "kiwi grass gluten lobster oysters perfume aspirin nuts peanuts hay fish"
)
INSTRUMENTS = _words(
  "harp piano violin cello flute drums guitar banjo trumpet tuba trombone clarinet oboe bassoon lute lyre sitar pipes "
  "cymbals organ bells horn bagpipes sax viola zither gong bongos recorder kazoo"
)
FOODS = _words(
  "sushi pizza pasta curry ramen tacos burritos lasagna risotto paella goulash stew soup salad dumplings noodles "
  "pancakes waffles kebab falafel hummus pie burgers steak ribs gnocchi tapas fondue chili omelettes"
)
LANGUAGES = _words(
  "Greek Latin Spanish French German Dutch Danish Swedish Finnish Polish Czech Russian Turkish Arabic Hebrew Hindi "
  "Tamil Thai Korean Japanese Chinese Malay Swahili Welsh Irish Zulu Italian Urdu Farsi Basque"
)
RITUALS = _words(
  "yoga stretching reading knitting drawing sewing prayers puzzles chess pilates origami sudoku pushups situps squats "
  "poker crochet darts humming breathing dusting ironing vacuuming laundry dishes homework juggling karate judo "
  "boxing"
)
VEHICLES = _words(
  "bus tram bike train ferry scooter taxi metro skates canoe kayak horse sled moped motorbike van truck boat glider "
  "cart trolley monorail gondola minibus cab tractor jeep raft sleigh plane"
)
FLAVOURS = _words(
  "honey lemon ginger mint milk sugar cinnamon cloves dill vanilla basil thyme sage figs plum jasmine syrup butter "
  "salt pepper nutmeg saffron anise fennel maple cocoa rum whisky lime oil"
)
PLACES = _words(
  "zoo museum castle library mall beach harbour park theatre opera market cathedral temple tower bridge farm lake "
  "river cave forest island volcano desert stadium circus palace gallery pier fair canyon"
)
PEOPLE = _words(
  "Alba Boris Celia Diego Elsa Fritz Greta Henk Ines Jorge Klara Lars Marta Nils Olga Pedro Quinn Rosa Sven Theo "
  "Ursula Viktor Wanda Xavi Yusuf Zelda Amir Bruno Chloe Doris"
)
THINGS = _words(
  "lamp chair table desk sofa clock mirror carpet kettle toaster blender fridge phone laptop camera printer tent "
  "backpack jacket coat hat scarf watch ring necklace vase pillow hammer ladder shovel"
)


@dataclasses.dataclass(frozen=True)
class Fact:
  """`subject` is a first name, `attribute` a key of `ATTRIBUTES`, `value` one word, or "" where it was lost."""

  subject: str
  attribute: str
  value: str

  @property
  def topic(self) -> tuple[str, str]:
    return self.subject, self.attribute


@dataclasses.dataclass(frozen=True)
class Event:
  """What a dated attribute needs beyond the rest: how its kind is named, and how it is counted ("" if it is not)."""

  infinitive: str
  verb: str = ""
  past: str = ""
  one: str = ""
  many: str = ""


@dataclasses.dataclass(frozen=True)
class Attribute:
  """Something that can be said of a person. `{s}` is the subject and `{v}` the value.

  Attributes:
    name: the key.
    module: the memory that it belongs to when the user speaks of themselves.
    values: what it can be.
    record: the canonical memory record.
    vague: a record that has lost the value.
    first: ways to tell it of oneself.
    third: ways to tell it of a friend; empty if only the user's own is ever told.
    questions: ways to ask for the value.
    event: set if it happens on a day; otherwise it is a state and a later value replaces an earlier one.
  """

  name: str
  module: Module
  values: tuple[str, ...]
  record: str
  vague: str
  first: tuple[str, ...]
  third: tuple[str, ...]
  questions: tuple[str, ...]
  event: Event | None = None


_ALL = (
  Attribute(
    "home", Module.CORE, CITIES, "{s} lives in {v}", "{s} lives in some city",
    ("I live in {v}.", "My home is in {v}.", "I have a flat in {v}."), ("{s} lives in {v}.", "{s} has a flat in {v}."),
    ("Where does {s} live?", "Which city does {s} live in?"),
  ),
  Attribute(
    "job", Module.CORE, JOBS, "{s} works as a {v}", "{s} has some job",
    ("I work as a {v}.", "My job is {v}.", "I earn my money as a {v}."), ("{s} works as a {v}.", "{s} is a {v}."),
    ("What is {s}'s job?", "What does {s} work as?"),
  ),
  Attribute(
    "age", Module.CORE, tuple(str(n) for n in range(10, 100)), "{s} is {v} years old", "{s} is some years old",
    ("I am {v} years old.", "My age is {v}.", "I turned {v}."), (), ("How old is {s}?", "What is {s}'s age?"),
  ),
  Attribute(
    "pet", Module.SEMANTIC, PETS, "{s} has a pet called {v}", "{s} has a pet",
    ("My pet is called {v}.", "I have a pet called {v}."), ("{s} has a pet called {v}.", "{s} named a pet {v}."),
    ("What is {s}'s pet called?", "What is the name of {s}'s pet?"),
  ),
  Attribute(
    "car", Module.SEMANTIC, COLOURS, "{s} drives a {v} car", "{s} drives a car",
    ("I drive a {v} car.", "My car is {v}."), ("{s} drives a {v} car.", "{s} owns a {v} car."),
    ("What colour is {s}'s car?", "Which car does {s} drive?"),
  ),
  Attribute(
    "allergy", Module.SEMANTIC, ALLERGENS, "{s} is allergic to {v}", "{s} is allergic to something",
    ("I am allergic to {v}.", "I can not stand {v}, an allergy."),
    ("{s} is allergic to {v}.", "{s} gets ill from {v}."),
    ("What is {s} allergic to?", "Which allergy does {s} have?"),
  ),
  Attribute(
    "instrument", Module.SEMANTIC, INSTRUMENTS, "{s} plays the {v}", "{s} plays something",
    ("I play the {v}.", "My instrument is the {v}."), ("{s} plays the {v}.", "{s} practises the {v}."),
    ("What does {s} play?", "Which instrument does {s} play?"),
  ),
  Attribute(
    "food", Module.SEMANTIC, FOODS, "{s} likes to eat {v}", "{s} likes to eat something",
    ("I like to eat {v}.", "My favourite food is {v}.", "I love {v}."), ("{s} likes to eat {v}.", "{s} loves {v}."),
    ("What does {s} like to eat?", "What is {s}'s favourite food?"),
  ),
  Attribute(
    "language", Module.SEMANTIC, LANGUAGES, "{s} learns {v}", "{s} learns some language",
    ("I am learning {v}.", "I take lessons in {v}."), ("{s} is learning {v}.", "{s} studies {v}."),
    ("What does {s} learn?", "Which language does {s} learn?"),
  ),
  Attribute(
    "ritual", Module.PROCEDURAL, RITUALS, "{s} does {v} before bed", "{s} does something before bed",
    ("I do {v} before bed.", "Before bed I always do {v}.", "My evening habit is {v}."), (),
    ("What does {s} do before bed?", "What is {s}'s evening habit?"),
  ),
  Attribute(
    "commute", Module.PROCEDURAL, VEHICLES, "{s} goes to work by {v}", "{s} goes to work somehow",
    ("I go to work by {v}.", "I take the {v} to work."), (), ("How does {s} go to work?", "What takes {s} to work?"),
  ),
  Attribute(
    "tea", Module.PROCEDURAL, FLAVOURS, "{s} makes tea with {v}", "{s} makes tea with something",
    ("I make my tea with {v}.", "I put {v} in my tea."), (), ("How does {s} make tea?", "What does {s} put in tea?"),
  ),
  Attribute(
    "visit", Module.EPISODIC, PLACES, "{s} visited the {v}", "{s} visited some place",
    ("I visited the {v} today.", "Today I went to the {v}.", "I spent today at the {v}."), (),
    ("What did {s} visit?", "Which place did {s} visit?"),
    Event("visit a place", "visit", "visited", "place", "places"),
  ),
  Attribute(
    "meeting", Module.EPISODIC, PEOPLE, "{s} met {v}", "{s} met some person",
    ("I met {v} today.", "Today I ran into {v}."), (),
    ("Whom did {s} meet?", "Which person did {s} meet?"), Event("meet a person", "meet", "met", "person", "people"),
  ),
  Attribute(
    "purchase", Module.EPISODIC, THINGS, "{s} bought a {v}", "{s} bought something",
    ("I bought a {v} today.", "Today I got a new {v}.", "I paid for a {v} today."), (),
    ("What did {s} buy?", "Which thing did {s} buy?"), Event("buy a thing", "buy", "bought", "thing", "things"),
  ),
  Attribute(
    "run", Module.EPISODIC, tuple(str(n) for n in range(3, 61)), "{s} ran {v} km", "{s} ran some km",
    ("I ran {v} km today.", "Today I did a run of {v} km."), (),
    ("How far did {s} run?", "How many km did {s} run?"), Event("go on a run"),
  ),
)  # fmt: skip


ATTRIBUTES = {attribute.name: attribute for attribute in _ALL}
STATES = tuple(name for name, attribute in ATTRIBUTES.items() if attribute.event is None)
SHARED_STATES = tuple(name for name in STATES if ATTRIBUTES[name].third)
EVENTS = tuple(name for name, attribute in ATTRIBUTES.items() if attribute.event is not None)
COUNTED = ("visit", "meeting", "purchase")


def template_pattern(template: str) -> re.Pattern[str]:
  """Returns the pattern that reads back a text made from a template: a name for `{s}`, any word for `{v}`."""
  pattern = re.escape(template).replace(r"\{s\}", r"(?P<s>[A-Z][a-z]+)", 1)
  pattern = pattern.replace(r"\{s\}", r"(?P=s)")
  return re.compile(pattern.replace(r"\{v\}", r"(?P<v>\w+)", 1))


_RECORDS = tuple((name, template_pattern(attribute.record)) for name, attribute in ATTRIBUTES.items())
_VAGUE = tuple((name, template_pattern(attribute.vague)) for name, attribute in ATTRIBUTES.items())


def record_text(fact: Fact) -> str:
  """Returns the canonical record of a fact, "Ann lives in Lisbon", or the vague one if its value was lost."""
  if not fact.value:
    return vague_text(fact)
  return ATTRIBUTES[fact.attribute].record.format(s=fact.subject, v=fact.value)


def vague_text(fact: Fact) -> str:
  """Returns the record of a fact whose value was lost: "Ann lives in some city"."""
  return ATTRIBUTES[fact.attribute].vague.format(s=fact.subject)


def home_module(fact: Fact, user: str) -> Module:
  """Returns the memory a fact belongs to: the profile is the user's own, what is known of others is semantic."""
  return ATTRIBUTES[fact.attribute].module if fact.subject == user else Module.SEMANTIC


@functools.lru_cache(maxsize=100_000)
def read_record(text: str) -> Fact | None:
  """Returns the fact that a canonical record states; None for vague records and every other text."""
  text = text.strip().rstrip(".")
  for name, pattern in _RECORDS:
    found = pattern.fullmatch(text)
    if found and found["v"] in ATTRIBUTES[name].values:
      return Fact(found["s"], name, found["v"])
  return None


@functools.lru_cache(maxsize=100_000)
def read_topic(text: str) -> tuple[str, str] | None:
  """Returns (subject, attribute) of a canonical or vague record, or None."""
  fact = read_record(text)
  if fact is not None:
    return fact.topic
  text = text.strip().rstrip(".")
  for name, pattern in _VAGUE:
    found = pattern.fullmatch(text)
    if found:
      return found["s"], name
  return None
