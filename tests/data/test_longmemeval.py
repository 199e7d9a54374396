"""The reader on haystacks made by hand with every fault of the real ones, on broken files, and on real samples."""

import copy
import json
import lzma

import pytest

from attrimem_jax.data import longmemeval, reading
from attrimem_jax.data.longmemeval import Change


def _turn(role, content, **more):
  return {"role": role, "content": content, **more}


@pytest.fixture
def instance():
  return {
    "question_id": "gpt4_x1",
    "question_type": "multi-session",
    "question": "How many kites do I own?",
    "answer": 2,
    "question_date": "2024/03/09 (Sat) 10:00",
    "haystack_dates": ["2024/03/02 (Sat) 23:59", "2024/03/01 (Fri) 00:05"],
    "haystack_session_ids": ["late", "early"],
    "haystack_sessions": [
      [_turn("user", "A second kite! ", has_answer=True), _turn("assistant", "Fine.")],
      [_turn("user", "I bought a kite.", has_answer=True), _turn("assistant", "Nice.", has_answer=False)],
    ],
    "answer_session_ids": ["early", "late"],
  }


def _one(instance):
  (episode,), report = longmemeval.parse([instance], "made.json")
  return episode, report


def test_an_instance_becomes_an_episode_in_the_order_of_dates(instance):
  episode, report = _one(instance)
  assert episode.history.id == "gpt4_x1"
  assert [(s.id, s.date) for s in episode.history.sessions] == [
    ("early", "2024-03-01T00:05"),
    ("late", "2024-03-02T23:59"),
  ]
  assert [(t.speaker, t.text, t.id) for t in episode.history.sessions[1].turns] == [
    ("user", "A second kite!", "late:1"),
    ("assistant", "Fine.", "late:2"),
  ]
  (question,) = episode.questions
  assert (question.id, question.kind, question.answers) == ("gpt4_x1", "multi-session", ("2",))
  assert (sorted(question.evidence), question.date) == (["early:1", "late:1"], "2024-03-09")
  assert dict(report.changes) == {
    Change.NUMBER: ("gpt4_x1",),
    Change.OUT_OF_ORDER: ("gpt4_x1",),
    Change.TRIMMED: ("gpt4_x1:late:1",),
  }
  assert "made.json: 1 conversations, 2 sessions, 4 turns, 1 questions (multi-session 1)" in report.text()


def test_the_suffix_of_the_id_means_to_abstain_and_the_explanation_is_no_gold(instance):
  instance |= {"question_id": "x1_abs", "answer": "You never mentioned kites."}
  for session in instance["haystack_sessions"]:
    for turn in session:
      turn.pop("has_answer", None)
  episode, report = _one(instance)
  (question,) = episode.questions
  assert question.abstain
  assert (question.kind, question.evidence) == ("multi-session", ())
  assert "never mentioned" not in repr(episode)
  assert report.changes[Change.ABSTENTION] == report.changes[Change.NO_EVIDENCE] == ("x1_abs",)


@pytest.mark.parametrize(
  ("spoil", "change", "place"),
  [
    (lambda i: i.update(question_date="2024/03/02 (Sat) 10:00"), Change.AFTER_QUESTION, "gpt4_x1"),
    (lambda i: i["answer_session_ids"].append("gone"), Change.MISSING_SESSION, "gpt4_x1:gone"),
    (lambda i: i["haystack_sessions"][0].reverse(), Change.ASSISTANT_FIRST, "gpt4_x1:late"),
    (lambda i: i["haystack_sessions"][0][1].update(content=" \n"), Change.EMPTY_TURN, "gpt4_x1:late:2"),
    (lambda i: i["haystack_sessions"].__setitem__(0, []), Change.EMPTY_SESSION, "gpt4_x1:late"),
    (lambda i: i["haystack_session_ids"].__setitem__(1, "late"), Change.REPEATED_SESSION, "gpt4_x1:late"),
    (lambda i: i.update(question="How\u200b many?"), Change.ZERO_WIDTH, "gpt4_x1"),
    (lambda i: i["haystack_sessions"][0][1].update(content="a\x02b\x0cc"), Change.CONTROL, "gpt4_x1:late:2"),
  ],
)
def test_irregularities_are_listed(instance, spoil, change, place):
  spoil(instance)
  _, report = _one(instance)
  assert report.changes[change] == (place,)


def test_turns_of_a_repeated_session_id_keep_different_names(instance):
  instance["haystack_session_ids"] = ["late", "late"]
  episode, _ = _one(instance)
  names = [turn.id for session in episode.history.sessions for turn in session.turns]
  assert sorted(names) == ["late#2:1", "late#2:2", "late:1", "late:2"]
  assert set(episode.questions[0].evidence) == {"late:1", "late#2:1"}


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda i: i.pop("question_id"), r"made.json\[0\]: not a LongMemEval file: field 'question_id' is missing"),
    (lambda i: i.update(question_id=" "), r"\[0\].question_id: .*without text"),
    (lambda i: i.update(question_type="single"), r"\[0\].question_type: .*'single' is none of single-session-user"),
    (lambda i: i.update(answer=True), r"\[0\].answer: .*expected text, got bool"),
    (lambda i: i.update(answer=float("nan")), r"\[0\].answer: .*nan is no answer"),
    (lambda i: i.update(answer=" "), r"\[0\].answer: .*an answer without text"),
    (lambda i: i.pop("answer"), r"\[0\]: .*field 'answer' is missing"),
    (lambda i: i.update(question=""), r"\[0\].question: .*without text"),
    (lambda i: i.update(question_date="2024/03/09 (Sun) 10:00"), r"question_date: .*that day is a Sat"),
    (lambda i: i.update(question_date="2024/02/30 (Fri) 10:00"), r"question_date: .*is not a date"),
    (lambda i: i.update(haystack_dates=["9 May", "x"]), r"haystack_dates\[0\]: .*'9 May' is not a date like"),
    (lambda i: i["haystack_dates"].pop(), r"haystack_sessions: .*2 ids, 1 dates and 2 sessions"),
    (
      lambda i: i.update(haystack_dates=i["haystack_session_ids"], haystack_session_ids=i["haystack_dates"]),
      r"haystack_dates\[0\]: .*'late' is not a date",
    ),
    (
      lambda i: i.update(haystack_dates=i["haystack_sessions"], haystack_sessions=i["haystack_dates"]),
      r"haystack_dates\[0\]: .*expected text, got list",
    ),
    (lambda i: i["haystack_sessions"][1][0].update(role="system"), r"haystack_sessions\[1\]\[0\].role: .*'system'"),
    (lambda i: i["haystack_sessions"][1][0].update(content=None), r"\[1\]\[0\].content: .*expected text, got NoneType"),
    (lambda i: i["haystack_sessions"][1][0].update(content="\ud800"), r"\[1\]\[0\].content: .*no Unicode"),
    (lambda i: i["haystack_sessions"][1][0].update(has_answer="yes"), r"has_answer: .*expected true or false, got str"),
    (lambda i: i.update(haystack_sessions=[[], []]), r"haystack_sessions: .*no turns"),
    (lambda i: i.update(answer_session_ids=[3]), r"answer_session_ids\[0\]: .*expected text, got int"),
  ],
)
def test_what_is_not_longmemeval_is_refused_with_its_place(instance, spoil, message):
  spoil(instance)
  with pytest.raises(ValueError, match=message):
    _one(instance)


def test_an_id_twice_and_no_instances_are_refused(instance):
  with pytest.raises(ValueError, match="question_id 'gpt4_x1' stands twice"):
    longmemeval.parse([instance, instance], "made.json")
  with pytest.raises(ValueError, match="holds no question"):
    longmemeval.parse([], "made.json")


@pytest.mark.parametrize("form", ["list", "lines", "packed", "indented"])
def test_every_form_of_file_reads_alike(instance, form, tmp_path, monkeypatch):
  monkeypatch.setattr(reading, "_CHUNK", 37)  # so that items are cut at every kind of place
  second = copy.deepcopy(instance) | {"question_id": "x2", "question": "Wo? \u00e4 \U0001fa81"}
  items = [instance, second]
  text = "\n".join(map(json.dumps, items)) if form == "lines" else json.dumps(items, indent=form == "indented" or None)
  file = tmp_path / ("made.json.xz" if form == "packed" else "made.json")
  file.write_bytes(lzma.compress(text.encode()) if form == "packed" else text.encode())
  episodes, report = longmemeval.read(file)
  assert episodes == longmemeval.parse(items, "")[0]
  assert report.conversations == 2


def test_every_cut_of_a_file_is_an_error_that_names_it(instance, tmp_path):
  text = json.dumps([instance])
  file = tmp_path / "cut.json"
  for length in range(0, len(text), 7):
    file.write_text(text[:length], encoding="utf-8")
    with pytest.raises(ValueError, match=r"cut\.json.*not a LongMemEval file"):
      longmemeval.read(file)
  packed = lzma.compress(text.encode())
  file = tmp_path / "cut.json.xz"
  file.write_bytes(packed[: len(packed) // 2])
  with pytest.raises(ValueError, match=r"cut\.json\.xz: .*not a whole \.xz file"):
    longmemeval.read(file)
  file.write_bytes(b"not packed")
  with pytest.raises(ValueError, match=r"cut\.json\.xz: .*not a whole \.xz file"):
    longmemeval.read(file)


def _refusal(instance):
  try:
    _one(instance)
  except ValueError as error:
    return str(error)
  return ""


def _places(value, path=()):
  yield path
  for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
    yield from _places(item, (*path, key))


def test_a_value_of_another_type_anywhere_is_read_or_refused_with_its_place(instance):
  refused = 0
  for path in [path for path in _places(instance) if path]:
    for value in (None, 3, "x", [], {}, [[]], True):
      spoilt = copy.deepcopy(instance)
      parent = spoilt
      for key in path[:-1]:
        parent = parent[key]
      parent[path[-1]] = value
      message = _refusal(spoilt)
      assert not message or message.startswith("made.json[0]"), (path, value)
      refused += bool(message)
  assert refused > 100


def test_an_endless_text_is_refused(instance, tmp_path, monkeypatch):
  monkeypatch.setattr(reading, "LARGEST", 10_000)
  monkeypatch.setattr(reading, "_CHUNK", 1000)
  file = tmp_path / "huge.json"
  instance["haystack_sessions"][0][0]["content"] = "a" * 100_000
  file.write_text(json.dumps([instance]), encoding="utf-8")
  with pytest.raises(ValueError, match=r"huge\.json\[0\]: .*an item of more than 10000 characters"):
    longmemeval.read(file)


# Counts taken from the files by a script of its own; they change only with the files.
_TYPES = {
  "temporal-reasoning": 109,
  "multi-session": 104,
  "knowledge-update": 60,
  "single-session-preference": 26,
  "single-session-assistant": 48,
  "single-session-user": 58,
}


def test_real_oracle(shared_data):
  episodes, report = longmemeval.read(shared_data / "longmemeval" / "longmemeval_oracle.dev.json.xz")
  assert (len(episodes), report.sessions, report.turns, report.questions) == (405, 764, 8831, _TYPES)
  assert {change: len(places) for change, places in report.changes.items()} == {
    Change.NUMBER: 25,
    Change.ABSTENTION: 27,
    Change.NO_EVIDENCE: 18,
    Change.OUT_OF_ORDER: 28,
    Change.AFTER_QUESTION: 34,
    Change.ASSISTANT_FIRST: 4,
    Change.TRIMMED: 8,
  }
  assert all(question.abstain == question.id.endswith("_abs") for episode in episodes for question in episode.questions)


def test_real_haystacks(shared_data):
  _, report = longmemeval.read(shared_data / "longmemeval" / "longmemeval_s_cleaned.sample.json")
  assert (report.conversations, report.sessions, report.turns) == (3, 134, 1416)
  assert {change: len(places) for change, places in report.changes.items()} == {
    Change.OUT_OF_ORDER: 2,
    Change.AFTER_QUESTION: 1,
    Change.REPEATED_SESSION: 1,
    Change.ASSISTANT_FIRST: 14,
    Change.EMPTY_TURN: 3,
  }


def test_real_data_of_another_benchmark_is_refused(shared_data):
  with pytest.raises(ValueError, match="not a LongMemEval file: field 'question_id' is missing among 'qa'"):
    longmemeval.read(shared_data / "locomo" / "locomo8.dev.json")
