"""What a memory of a synthetic episode holds and what of it is needed, against episodes that can be read by eye."""

from attrimem_jax.data.coverage import Coverage, coverage, needed_facts
from attrimem_jax.data.synthetic import WorldConfig, episode
from attrimem_jax.data.teacher import gold_records
from attrimem_jax.data.world import Fact
from attrimem_jax.types import Episode, History, Module, Note, Question, Record, Session

DAYS = ("2024-01-01", "2024-02-01", "2024-03-01")
TOLD = (
  Note(0, Module.CORE, "Ann lives in Lisbon"),
  Note(0, Module.EPISODIC, "Ann visited the zoo"),
  Note(1, Module.CORE, "Ann lives in Oslo"),
  Note(1, Module.EPISODIC, "Ann visited the museum"),
  Note(2, Module.EPISODIC, "Ann ran 12 km"),
)


def story(*questions: str) -> Episode:
  sessions = tuple(Session(f"S{i + 1}", day, ()) for i, day in enumerate(DAYS))
  asked = tuple(Question(f"q{i}", text, (), "any") for i, text in enumerate(questions))
  return Episode(History("h", sessions), asked, TOLD)


def record(number: int, text: str, tokens: int) -> Record:
  return Record(number, Module.SEMANTIC, text, tuple(range(tokens)))


def test_an_answer_needs_the_newest_value_every_counted_event_and_nothing_where_nothing_was_told():
  home, zoo, museum = Fact("Ann", "home", "Oslo"), Fact("Ann", "visit", "zoo"), Fact("Ann", "visit", "museum")
  assert needed_facts(story("Where does Ann live now?")) == {home}
  assert needed_facts(story("How many places did Ann visit?")) == {zoo, museum}
  assert needed_facts(story("When did Ann visit a place?")) == {zoo}
  assert needed_facts(story("How does Ann make tea?", "Where does Ben live?")) == set()
  assert needed_facts(story("Where does Ann live?", "What is this about?")) == {home}


def test_counts_by_hand():
  asked = story("Where does Ann live?")
  memory = [
    record(1, "Ann lives in Oslo", 5),  # needed
    record(2, "Ann ran 12 km", 7),  # true, but nobody asks
    record(3, "Ann lives in Lisbon", 11),  # outdated
    record(4, "Ann lives in some city", 13),  # vague
    record(5, "Ann is tired", 17),  # chatter
    record(6, "Ann lives in Oslo", 19),  # the same once more
  ]
  assert coverage(asked, memory) == Coverage(facts=4, held=2, tokens=72, stating=31, needed=24)
  assert coverage(asked, []) == Coverage(facts=4, held=0, tokens=0, stating=0, needed=0)


def test_every_fact_of_the_worlds_own_evidence_is_needed():
  """The story's turns say which facts its questions lean on: an account of its own, kept as turns and not as facts."""
  for number in range(40):
    one = episode(WorldConfig(), "eval", 5, number)
    texts = {turn.id: turn.text for session in one.history.sessions for turn in session.turns}
    used = [texts[turn] for question in one.questions for turn in question.evidence]
    needed = needed_facts(one)
    assert all(any(fact.value in text for text in used) for fact in needed)
    assert all(any(fact.value in text for fact in needed) for text in used)
    perfect = [record(i, text, 1) for i, (_, text, _) in enumerate(gold_records(one))]
    counts = coverage(one, perfect)
    assert counts.held == counts.facts == counts.stating == counts.tokens >= counts.needed > 0
