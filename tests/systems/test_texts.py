"""Systems without a model: what they keep, in which order, and how little of a question they see."""

import pytest

from attrimem_jax.memory.retrieval import Bm25
from attrimem_jax.systems import texts
from attrimem_jax.systems.protocol import Passage, blinded
from attrimem_jax.types import History, Question, Session, Turn

HISTORY = History(
  "h",
  (
    Session("s1", "2024-03-01T09:00", (Turn("Ann", "My cat is Tom", "t1"), Turn("Bob", " ", "t2"))),
    Session("s2", "2024-03-02", (Turn("", "The harp is loud", "t3"),)),
  ),
)
ASKED = Question("q_abs", "Whose cat?", ("Tom",), "single-hop", ("t3", "t1", "t3", "gone"), "2024-04-01")


def _found(system, question=ASKED):
  return system.write(HISTORY, 0).retrieve([blinded(question, system.sees_evidence)])[0]


CAT, HARP = Passage("Ann: My cat is Tom", "2024-03-01T09:00", 0), Passage("The harp is loud", "2024-03-02", 1)


def test_utterances_and_sessions_leave_out_what_has_no_text():
  assert texts.utterances(HISTORY) == (CAT, HARP)
  assert texts.sessions(HISTORY) == (CAT, HARP)


@pytest.mark.parametrize("by_session", [True, False])
def test_retrieval_ranks_by_the_question(by_session):
  assert _found(texts.Rag("rag", Bm25(top_k=1), by_session)) == (CAT,)


def test_the_newest_come_first_and_evidence_in_its_own_order_once():
  assert _found(texts.Newest("recency", whole=False)) == (HARP, CAT)
  assert [p.text for p in _found(texts.Oracle())] == [HARP.text, CAT.text]
  assert _found(texts.Nothing()) == ()


def test_a_blinded_question_holds_words_and_day_alone():
  assert blinded(ASKED) == Question("", "Whose cat?", (), "", (), "2024-04-01")
  assert blinded(ASKED, sees_evidence=True).evidence == ASKED.evidence
