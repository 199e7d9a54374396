"""What a memory of a synthetic episode is worth by the world's own truth: facts held, and tokens that are needed."""

import dataclasses
from collections.abc import Sequence

from attrimem_jax.data import queries, world
from attrimem_jax.data.teacher import gold_records
from attrimem_jax.types import Episode, Record


@dataclasses.dataclass(frozen=True)
class Coverage:
  """Counts of one memory; sums of them over memories give shares.

  Attributes:
    facts: what a perfect writer would hold in the end (`teacher.gold_records`).
    held: those of them that some current record states.
    tokens: of the current records.
    stating: those of records that state one of the facts, so neither chatter nor something vague, wrong or outdated.
    needed: those of records that state what an asked question is answered from.
  """

  facts: int
  held: int
  tokens: int
  stating: int
  needed: int


def coverage(episode: Episode, records: Sequence[Record]) -> Coverage:
  """Counts for the current records of an episode's memory."""
  gold = {world.read_record(text) for _, text, _ in gold_records(episode)}
  needed = needed_facts(episode)
  stated = [(world.read_record(record.text), len(record.ids)) for record in records]
  return Coverage(
    facts=len(gold),
    held=len(gold & {fact for fact, _ in stated}),
    tokens=sum(count for _, count in stated),
    stating=sum(count for fact, count in stated if fact in gold),
    needed=sum(count for fact, count in stated if fact in needed),
  )


def needed_facts(episode: Episode) -> set[world.Fact]:
  """The facts that the answers to an episode's questions are made from; none for those to be abstained from."""
  dates = [session.date for session in episode.history.sessions]
  told = [(fact, dates[n.session]) for n in episode.notes if (fact := world.read_record(n.text)) is not None]
  asked = [queries.read(question.text) for question in episode.questions]
  replies = [queries.resolve(query, told) for query in asked if query is not None]
  return {told[i][0] for reply in replies if reply is not None for i in reply.used}
