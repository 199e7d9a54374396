"""The reader on a small file made by hand with every fault of the real one, on broken files, and on real samples."""

import json
import math

import pytest

from attrimem_jax.data import locomo
from attrimem_jax.data.locomo import Change
from attrimem_jax.types import Module


def _turn(name, speaker, text, **more):
  return {"speaker": speaker, "dia_id": name, "text": text, **more}


def _qa(question, category, evidence=("D1:1",), **answers):
  return {"question": question, "category": category, "evidence": list(evidence), **answers}


@pytest.fixture
def conversation():
  """Two sessions whose numbers sort wrongly as text, one date too many."""
  return {
    "sample_id": "pair",
    "conversation": {
      "speaker_a": "Ada",
      "speaker_b": "Bo",
      "session_10_date_time": "12:05 am on 2 March, 2024",
      "session_10": [_turn("D10:1", "Bo", "A kite!\nLook", img_url=["x"], blip_caption="a red kite on a beach")],
      "session_2_date_time": "3:10 pm on 1 March, 2024",
      "session_2": [_turn("D2:1", "Ada", "I moved to Oslo. "), _turn("D2:2", "Bo", "Braces {like} <|this|>")],
      "session_3_date_time": "4:00 pm on 1 March, 2024",
    },
    "observation": {"session_2_observation": {"Ada": [["Ada moved to Oslo.", "D2:1"], ["Ada likes it.", ["D2:1"]]]}},
    "qa": [_qa("Where does Ada live?", 4, ["D2:1"], answer="Oslo")],
  }


def _read(conversation):
  return locomo.parse([conversation], "made.json")


def _change(conversation, change):
  _, report = _read(conversation)
  return report.changes.get(change, ())


def test_sessions_sort_by_number_and_carry_iso_dates(conversation):
  (episode,), _ = _read(conversation)
  assert episode.history.id == "pair"
  assert [(s.id, s.date) for s in episode.history.sessions] == [
    ("session_2", "2024-03-01T15:10"),
    ("session_10", "2024-03-02T00:05"),
  ]


def test_text_is_kept_but_for_outer_blanks_and_holds_the_caption(conversation):
  (episode,), report = _read(conversation)
  first, second = episode.history.sessions
  assert [(t.speaker, t.text, t.id) for t in first.turns] == [
    ("Ada", "I moved to Oslo.", "D2:1"),
    ("Bo", "Braces {like} <|this|>", "D2:2"),
  ]
  assert second.turns[0].text == "A kite!\nLook [shares an image: a red kite on a beach]"
  assert report.images == 1
  assert report.changes[Change.TRIMMED] == ("pair:D2:1",)


def test_an_image_without_words_is_its_caption(conversation):
  conversation["conversation"]["session_10"][0]["text"] = ""
  (episode,), report = _read(conversation)
  assert episode.history.sessions[1].turns[0].text == "[shares an image: a red kite on a beach]"
  assert Change.EMPTY_TURN not in report.changes


def test_observations_become_semantic_notes_at_the_position_of_their_session(conversation):
  conversation["observation"]["session_10_observation"] = {"Bo": [["Bo has a kite.", "D10:1"]]}
  conversation["observation"]["session_3_observation"] = {"Bo": [["Never happened.", "D3:1"]]}
  (episode,), report = _read(conversation)
  assert [(n.session, n.module, n.text) for n in episode.notes] == [
    (0, Module.SEMANTIC, "Ada moved to Oslo."),
    (0, Module.SEMANTIC, "Ada likes it."),
    (1, Module.SEMANTIC, "Bo has a kite."),
  ]
  assert report.changes[Change.NOTE_WITHOUT_SESSION] == ("pair:session_3_observation",)


def test_questions_are_keyed_by_index_and_asked_on_the_last_day(conversation):
  (episode,), _ = _read(conversation)
  (question,) = episode.questions
  assert (question.id, question.kind, question.date) == ("pair:q0", "single-hop", "2024-03-02")
  assert (question.text, question.answers, question.evidence) == ("Where does Ada live?", ("Oslo",), ("D2:1",))


@pytest.mark.parametrize(
  ("category", "kind"), [(1, "multi-hop"), (2, "temporal"), (3, "open-domain"), (4, "single-hop"), (5, "adversarial")]
)
def test_categories_have_the_names_of_the_data_set(conversation, category, kind):
  conversation["qa"] = [_qa("Why?", category, answer="So")]
  (episode,), report = _read(conversation)
  assert episode.questions[0].kind == kind
  assert report.questions == {kind: 1}
  assert f"{category} {kind} 1" in report.text()


def test_an_adversarial_question_has_no_gold_and_never_the_lure(conversation):
  conversation["qa"] = [_qa("What is Bo's car?", 5, adversarial_answer="a van")]
  (episode,), _ = _read(conversation)
  assert episode.questions[0].abstain
  assert "van" not in repr(episode.questions)


def test_an_adversarial_question_with_an_answer_keeps_it(conversation):
  conversation["qa"] = [_qa("Is Rex Ada's?", 5, adversarial_answer="Yes", answer="No")]
  (episode,), report = _read(conversation)
  assert episode.questions[0].answers == ("No",)
  assert report.changes[Change.ADVERSARIAL_WITH_ANSWER] == ("pair:q0",)


def test_numbers_and_stray_characters_in_answers(conversation):
  conversation["qa"] = [_qa("When?", 2, answer=2022), _qa(" Who?", 4, answer="\u200bAda\u200b ")]
  (episode,), report = _read(conversation)
  assert [q.answers for q in episode.questions] == [("2022",), ("Ada",)]
  assert episode.questions[1].text == "Who?"
  assert report.changes[Change.NUMBER] == ("pair:q0",)
  assert report.changes[Change.ZERO_WIDTH] == ("pair:q1",)


def test_the_joiner_inside_an_emoji_stays(conversation):
  family = "\U0001f469\u200d\U0001f467"
  conversation["qa"] = [_qa("Which emoji?", 4, answer=family)]
  (episode,), report = _read(conversation)
  assert episode.questions[0].answers == (family,)
  assert Change.ZERO_WIDTH not in report.changes


@pytest.mark.parametrize(
  ("evidence", "kept", "change"),
  [
    (["D2:1; D10:1"], ("D2:1", "D10:1"), Change.JOINED_EVIDENCE),
    (["D2:1 D2:2 D10:1"], ("D2:1", "D2:2", "D10:1"), Change.JOINED_EVIDENCE),
    (["D10:01"], ("D10:1",), Change.MENDED_EVIDENCE),
    (["D:10:1"], ("D10:1",), Change.MENDED_EVIDENCE),
    (["D", "D2:2"], ("D2:2",), Change.UNREADABLE_EVIDENCE),
    ([""], (), Change.UNREADABLE_EVIDENCE),
    (["D2:9"], (), Change.DANGLING_EVIDENCE),
    ([], (), Change.NO_EVIDENCE),
  ],
)
def test_evidence(conversation, evidence, kept, change):
  conversation["qa"] = [_qa("Where?", 1, evidence, answer="Oslo")]
  (episode,), report = _read(conversation)
  assert episode.questions[0].evidence == kept
  assert [c for c in report.changes if "evidence" in c] == [change]


def test_repeated_questions_are_all_kept(conversation):
  twice = _qa("Where?", 4, ["D2:1"], answer="Oslo")
  conversation["qa"] = [twice, twice, _qa("Where?", 5, ["D2:1"], adversarial_answer="Oslo")]
  (episode,), report = _read(conversation)
  assert [q.id for q in episode.questions] == ["pair:q0", "pair:q1", "pair:q2"]
  assert report.changes[Change.REPEATED_QUESTION] == ("pair:q1",)
  assert report.changes[Change.CONTRADICTORY_QUESTION] == ("pair:q2",)


def test_dates_without_sessions_are_left_out(conversation):
  assert _change(conversation, Change.DATE_WITHOUT_SESSION) == ("pair:session_3",)


def test_a_session_without_date_is_kept(conversation):
  del conversation["conversation"]["session_2_date_time"]
  (episode,), report = _read(conversation)
  assert episode.history.sessions[0].date == ""
  assert report.changes[Change.SESSION_WITHOUT_DATE] == ("pair:session_2",)


def test_an_empty_session_is_left_out_and_moves_no_note(conversation):
  conversation["conversation"]["session_1"] = []
  conversation["conversation"]["session_1_date_time"] = "3:10 pm on 1 March, 2023"
  (episode,), report = _read(conversation)
  assert [s.id for s in episode.history.sessions] == ["session_2", "session_10"]
  assert episode.notes[0].session == 0
  assert report.changes[Change.EMPTY_SESSION] == ("pair:session_1",)


def test_the_rest_of_what_is_kept_as_it_is(conversation):
  talk = conversation["conversation"]
  talk["session_10_date_time"] = "3:10 pm on 1 March, 2023"
  talk["session_2"] += [_turn("D2:2", "Cy", "")]
  (episode,), report = _read(conversation)
  assert len(episode.history.sessions[0].turns) == 3
  assert report.changes[Change.DATE_OUT_OF_ORDER] == ("pair:session_10",)
  assert report.changes[Change.REPEATED_TURN] == ("pair:D2:2",)
  assert report.changes[Change.UNKNOWN_SPEAKER] == ("pair:D2:2",)
  assert report.changes[Change.EMPTY_TURN] == ("pair:D2:2",)


def test_the_report_counts_and_names(conversation):
  _, report = _read(conversation)
  assert (report.conversations, report.sessions, report.turns) == (1, 2, 3)
  text = report.text()
  assert "made.json: 1 conversations, 2 sessions, 3 turns (1 with an image caption), 1 questions" in text
  assert f"1  {Change.DATE_WITHOUT_SESSION}: pair:session_3" in text


def _without_sessions(item):
  for key in [key for key in item["conversation"] if key.startswith("session_")]:
    del item["conversation"][key]


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (
      lambda c: c.pop("sample_id"),
      r"made.json\[0\]: not a LoCoMo file: field 'sample_id' is missing among 'conversation'",
    ),
    (lambda c: c.pop("qa"), r"made.json\[0\]: .*field 'qa' is missing"),
    (lambda c: c.update(qa={}), r"made.json\[0\].qa: .*expected a list, got dict"),
    (_without_sessions, r"made.json\[0\].conversation: .*no sessions"),
    (lambda c: c["conversation"].update(session_2="x"), r"conversation.session_2: .*expected a list, got str"),
    (lambda c: c["conversation"]["session_2"][0].pop("text"), r"session_2\[0\]: .*field 'text' is missing"),
    (lambda c: c["conversation"].update(session_2_date_time="noon"), r"session_2_date_time: .*'noon' is not a date"),
    (lambda c: c["qa"][0].update(category=6), r"qa\[0\].category: .*category 6 is none of 1, 2, 3, 4, 5"),
    (lambda c: c["qa"][0].update(category=True), r"qa\[0\].category: .*expected a whole number, got bool"),
    (lambda c: c["qa"][0].pop("answer"), r"qa\[0\]: .*field 'answer' is missing"),
    (lambda c: c["qa"][0].update(answer=["Oslo"]), r"qa\[0\].answer: .*expected text, got list"),
    (lambda c: c["qa"][0].update(answer=" "), r"qa\[0\].answer: .*an answer without text"),
    (lambda c: c["qa"][0].update(evidence=[3]), r"qa\[0\].evidence\[0\]: .*expected text, got int"),
    (lambda c: c["observation"]["session_2_observation"].update(Ada=[[]]), r"Ada\[0\]: .*observation without text"),
    *(
      (lambda c, key=key, other=other: c["conversation"].update({key: c["conversation"][other]}), message)
      for key, other, message in (
        ("session_02", "session_2", "conversation: .*keys 'session_2' and 'session_02' have the same number"),
        ("session_02_date_time", "session_2_date_time", "'session_2_date_time' and 'session_02_date_time'"),
        ("session_\u0662", "session_2", "key 'session_\u0662' has no number"),
        ("session_" + "9" * 5000, "session_2", "has no number of up to nine digits"),
      )
    ),
    (
      lambda c: c["observation"].update(session_02_observation={}),
      "'session_2_observation' and 'session_02_observation'",
    ),
    *(
      (lambda c, value=value: c["qa"][0].update(answer=value), r"qa\[0\].answer: .*is no answer")
      for value in (math.nan, math.inf, -math.inf, 10**5000)
    ),
    *(
      (lambda c, value=value: c["qa"][0].update(question=value), r"qa\[0\].question: .*question without text")
      for value in ("", " ", "\u200b")
    ),
    (lambda c: c.update(sample_id="\ud800"), r"made.json\[0\].sample_id: .*no Unicode"),
    (
      lambda c: c["qa"][0].update(question="W\ud800"),
      r"qa\[0\].question: .*'\\ud800' at character 1, which is no Unicode",
    ),
    (lambda c: c["qa"][0].update(answer="\ud800"), r"qa\[0\].answer: .*no Unicode"),
    (lambda c: c["qa"][0].update(evidence=["\ud800"]), r"qa\[0\].evidence\[0\]: .*no Unicode"),
    (lambda c: c["conversation"].update(speaker_a="\ud800"), r"speaker_a: .*no Unicode"),
    (lambda c: c["conversation"]["session_2"][0].update(text="\ud800"), r"session_2\[0\].text: .*no Unicode"),
    (lambda c: c["conversation"]["session_10"][0].update(blip_caption="\ud800"), r"\[0\].blip_caption: .*no Unicode"),
    (
      lambda c: c["conversation"]["session_10"][0].update(blip_caption=["x"]),
      r"blip_caption: .*expected text, got list",
    ),
    (lambda c: c["observation"]["session_2_observation"].update(Ada=[["\ud800"]]), r"Ada\[0\]\[0\]: .*no Unicode"),
    (lambda c: c["observation"].update(session_2_observation={"\ud800": []}), r"session_2_observation: .*no Unicode"),
  ],
)
def test_what_is_not_locomo_is_refused_with_its_place(conversation, spoil, message):
  spoil(conversation)
  with pytest.raises(ValueError, match=message):
    _read(conversation)


@pytest.mark.parametrize("data", [{}, [], [3], None, "text"])
def test_other_json_is_refused(data):
  with pytest.raises(ValueError, match=r"made\.json.*: not a LoCoMo file"):
    locomo.parse(data, "made.json")


def test_a_conversation_twice_is_refused(conversation):
  with pytest.raises(ValueError, match="sample_id 'pair' stands twice"):
    locomo.parse([conversation, conversation], "made.json")


def test_a_cut_file_says_where_it_breaks(conversation, tmp_path):
  file = tmp_path / "cut.json"
  file.write_text(json.dumps([conversation])[:-40])
  with pytest.raises(ValueError, match=r"cut\.json: not a LoCoMo file: broken or cut JSON at line 1, column \d+"):
    locomo.read(file)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("[" * 100_000, "nested too deeply"),
    ('[{"sample_id": ' + "9" * 5000 + "}]", "made.json: not a LoCoMo file: Exceeds the limit"),
    ('[{"qa": [], "qa": []}]', "key 'qa' stands twice in one object"),
  ],
)
def test_json_that_python_would_not_read_or_would_read_in_part(text, message, tmp_path):
  (tmp_path / "made.json").write_text(text)
  with pytest.raises(ValueError, match=message):
    locomo.read(tmp_path / "made.json")


@pytest.mark.parametrize("path", ["~nouser/x", "\0", "/"])
def test_paths_without_a_file(path):
  with pytest.raises(ValueError, match="There is no file at"):
    locomo.read(path)


@pytest.mark.parametrize("path", [None, 3, b"made.json"])
def test_what_is_no_path(path):
  with pytest.raises(ValueError, match="give a path"):
    locomo.read(path)


def test_a_packed_file_is_refused(tmp_path):
  file = tmp_path / "locomo.json.xz"
  file.write_bytes(b"\xfd7zXZ\x00\x00\x04\xe6\xd6")
  with pytest.raises(ValueError, match="unpack it first"):
    locomo.read(file)


def test_the_path_may_come_from_the_environment(conversation, tmp_path, monkeypatch):
  file = tmp_path / "made.json"
  file.write_text(json.dumps([conversation]), encoding="utf-8")
  monkeypatch.setenv("ATTRIMEM_DATA", str(file))
  (episode,), report = locomo.read()
  assert (episode.history.id, report.file) == ("pair", str(file))
  with pytest.raises(ValueError, match=r"no file at 'elsewhere\.json'"):
    locomo.read("elsewhere.json")
  monkeypatch.delenv("ATTRIMEM_DATA")
  with pytest.raises(ValueError, match=r"set config\.data\.path or ATTRIMEM_DATA"):
    locomo.read()


def test_real_conversations(shared_data):
  """Counts taken from the file by a script of its own; they change only with the file."""
  episodes, report = locomo.read(shared_data / "locomo" / "locomo8.dev.json")
  assert len(episodes) == 8
  assert (report.sessions, report.turns, report.images) == (216, 4684, 1025)
  assert report.questions == {
    "multi-hop": 225,
    "temporal": 254,
    "open-domain": 70,
    "single-hop": 685,
    "adversarial": 366,
  }
  assert {change: len(places) for change, places in report.changes.items()} == {
    Change.DATE_WITHOUT_SESSION: 16,
    Change.TRIMMED: 181,
    Change.NUMBER: 6,
    Change.ADVERSARIAL_WITH_ANSWER: 2,
    Change.JOINED_EVIDENCE: 1,
    Change.MENDED_EVIDENCE: 2,
    Change.UNREADABLE_EVIDENCE: 1,
    Change.DANGLING_EVIDENCE: 1,
    Change.NO_EVIDENCE: 4,
    Change.REPEATED_QUESTION: 11,
    Change.CONTRADICTORY_QUESTION: 1,
  }
  questions = [question for episode in episodes for question in episode.questions]
  assert len({question.id for question in questions}) == len(questions) == 1600
  assert sum(question.abstain for question in questions) == 364
  assert episodes[0].history.sessions[0].date == "2023-05-08T13:56"
  assert sum(len(episode.notes) for episode in episodes) == 2033


def test_real_data_of_another_benchmark_is_refused(shared_data):
  with pytest.raises(ValueError, match="not a LoCoMo file: field 'sample_id' is missing among 'question_id'"):
    locomo.read(shared_data / "longmemeval" / "longmemeval_oracle.sample.json")
