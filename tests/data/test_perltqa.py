"""The reader on a protagonist made by hand with every fault of the real ones, on broken files, and on real samples."""

import copy
import json

import pytest

from attrimem_jax.data import benchmarks, dates, perltqa
from attrimem_jax.data.perltqa import Change


def _qa(question, reference, answer="Yes.", **more):
  return {"Question": question, "Answer": answer, "Reference Memory": reference, "Memory Anchors": [], **more}


@pytest.fixture
def memory():
  return {
    "Ada": {
      "profile": {"Gender": "female", "Age": 28},
      "profile_description": "Not read.",
      "social_relationship": {
        "1_0": {"Supporting Characters": "Bo", "Description": "Ada&#39;s brother", "Relationship": "brother"}
      },
      "events": {
        "1_0_1": {"content": "They sail.", "Creation Time": "May 2, 2022"},
        "1_0_0": {"content": "They read of Rome.", "Creation Time": "73 BC"},
      },
      "dialogues": {
        "1_0_1#0": {
          "events": "1_0_1",
          "contents": {"2022-05-02 10:00": ["Bo: The sea: calm.", "Wind"], "2021-01-01 09:00": ["Ada: Hello"]},
        }
      },
    }
  }


@pytest.fixture
def asked():
  return [
    {
      "Ada": {
        "profile": [_qa("How old is Ada?", "Age", 28)],
        "social_relationship": [{"1_0": [_qa("Who is Bo?", "['1_0']")]}],
        "events": [{"1_0_0": [_qa("What of Rome?", "['1_0_0', '1_0_1']")]}],
        "dialogues": [{"1_0_1#0": [_qa("Is it calm?", "['1_0_1#0']")]}],
      }
    }
  ]


def _read(memory, asked):
  (episode,), report = perltqa.parse(memory, asked, "mem.json", "qa.json")
  return episode, report


def test_a_protagonist_becomes_a_history_with_all_of_the_memory(memory, asked):
  episode, report = _read(memory, asked)
  assert [(s.id, s.date, [t.id for t in s.turns]) for s in episode.history.sessions] == [
    ("profile", "", ["profile:Gender", "profile:Age"]),
    ("social_relationship", "", ["1_0"]),
    ("1_0_0", "", ["1_0_0"]),
    ("1_0_1#0@2", "2021-01-01T09:00", ["1_0_1#0:3"]),
    ("1_0_1", "2022-05-02", ["1_0_1"]),
    ("1_0_1#0", "2022-05-02T10:00", ["1_0_1#0:1", "1_0_1#0:2"]),
  ]
  turns = {turn.id: (turn.speaker, turn.text) for session in episode.history.sessions for turn in session.turns}
  assert turns["profile:Age"] == ("", "Age: 28")
  assert turns["1_0"] == ("", "Bo: Ada's brother (brother)")
  assert turns["1_0_0"] == ("", "[73 BC] They read of Rome.")
  assert turns["1_0_1#0:1"] == ("Bo", "The sea: calm.")
  assert turns["1_0_1#0:2"] == ("", "Wind")
  assert dict(report.changes) == {
    Change.UNDATED: ("Ada:1_0_0 '73 BC'",),
    Change.TWO_DATES: ("Ada:1_0_1#0",),
    Change.NO_SPEAKER: ("Ada:1_0_1#0:2",),
    Change.NUMBER: ("Ada:profile:Age", "Ada:q0"),
    Change.ENTITY: ("Ada:1_0",),
  }


def test_questions_are_keyed_by_number_and_refer_to_turns(memory, asked):
  episode, report = _read(memory, asked)
  assert [(q.id, q.kind, q.answers, q.evidence, q.date) for q in episode.questions] == [
    ("Ada:q0", "profile", ("28",), ("profile:Age",), "2022-05-02"),
    ("Ada:q1", "social_relationship", ("Yes.",), ("1_0",), "2022-05-02"),
    ("Ada:q2", "events", ("Yes.",), ("1_0_0", "1_0_1"), "2022-05-02"),
    ("Ada:q3", "dialogues", ("Yes.",), ("1_0_1#0:3", "1_0_1#0:1", "1_0_1#0:2"), "2022-05-02"),
  ]
  assert report.questions == {"profile": 1, "social_relationship": 1, "events": 1, "dialogues": 1}


@pytest.mark.parametrize(
  ("reference", "evidence", "changes"),
  [
    ("['1_0_9']", (), {Change.DANGLING_REFERENCE, Change.NO_EVIDENCE}),
    ("['1_0_9', '1_0_0']", ("1_0_0",), {Change.DANGLING_REFERENCE}),
    ("[", ("1_0_1",), {Change.UNREADABLE_REFERENCE}),
    ("['1_0_0'] + 1", ("1_0_1",), {Change.UNREADABLE_REFERENCE}),
    ("__import__('os')", ("1_0_1",), {Change.UNREADABLE_REFERENCE}),
    ("[4]", ("1_0_1",), {Change.UNREADABLE_REFERENCE}),
  ],
)
def test_references(memory, asked, reference, evidence, changes):
  asked[0]["Ada"]["events"] = [{"1_0_1": [_qa("Where?", reference)]}]
  episode, report = _read(memory, asked)
  assert episode.questions[2].evidence == evidence
  assert {change for change in report.changes if "reference" in change} == changes


def test_parts_that_lack_and_protagonists_that_nobody_asks_about_are_listed(memory, asked):
  memory["Cy"] = {"profile": {"Gender": "male"}}
  del memory["Ada"]["dialogues"]
  memory["Ada"]["profile"]["Hobbies"] = ["sails", "kites"]
  episode, report = _read(memory, asked)
  assert episode.history.id == "Ada"
  assert report.conversations == 1
  assert episode.history.sessions[0].turns[2].text == "Hobbies: sails, kites"
  assert report.changes[Change.LIST] == ("Ada:profile:Hobbies",)
  assert report.changes[Change.NO_QUESTIONS] == ("Cy",)
  assert "Ada:dialogues" in report.changes[Change.MISSING_PART]
  assert report.changes[Change.NO_EVIDENCE] == ("Ada:q3",)


def test_the_same_protagonist_twice_in_the_list_goes_on_counting(memory, asked):
  episode, report = _read(memory, [*asked, *asked])
  assert [q.id for q in episode.questions] == [f"Ada:q{i}" for i in range(8)]
  assert len(report.changes[Change.REPEATED_QUESTION]) == 4


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda m, a: m.clear(), r"mem\.json: .*no protagonist"),
    (lambda m, a: m.update(Ada=[]), r"mem\.json\['Ada'\]: .*expected an object, got list"),
    (lambda m, a: m.update(Ada={}), r"mem\.json\['Ada'\]: .*no memory"),
    (lambda m, a: m["Ada"].update(events=[]), r"\['Ada'\]\.events: .*expected an object, got list"),
    (lambda m, a: m["Ada"]["events"]["1_0_1"].pop("content"), r"events\.1_0_1: .*field 'content' is missing"),
    (lambda m, a: m["Ada"]["profile"].update(Age=None), r"profile\.Age: .*expected text, got NoneType"),
    (lambda m, a: m["Ada"]["dialogues"]["1_0_1#0"].update(contents=[]), r"1_0_1#0\.contents: .*expected an object"),
    (lambda m, a: a[0].update(Cy={}), r"qa\.json\[0\]: .*protagonist 'Cy' is not in mem\.json"),
    (lambda m, a: a.clear(), r"qa\.json: .*no question"),
    (lambda m, a: a[0]["Ada"].update(dreams=[]), r"qa\.json\[0\]\['Ada'\]: .*kind 'dreams' is none of profile"),
    (lambda m, a: a[0]["Ada"]["profile"][0].pop("Answer"), r"profile\[0\]\.Answer: .*expected text, got NoneType"),
    (lambda m, a: a[0]["Ada"]["profile"][0].update(Question=" "), r"profile\[0\]: .*a question without text"),
    (lambda m, a: a[0]["Ada"]["events"][0].update({"1_0_0": {}}), r"events\[0\]\.1_0_0: .*expected a list, got dict"),
  ],
)
def test_what_is_not_perltqa_is_refused_with_its_place(memory, asked, spoil, message):
  spoil(memory, asked)
  with pytest.raises(ValueError, match=message):
    _read(memory, asked)


def _places(value, path=()):
  yield path
  for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
    yield from _places(item, (*path, key))


def _refusal(pair):
  try:
    perltqa.parse(*pair, "mem.json", "qa.json")
  except ValueError as error:
    return str(error)
  return ""


def test_a_value_of_another_type_anywhere_is_read_or_refused_with_its_place(memory, asked):
  refused = 0
  for path in [path for path in _places([memory, asked]) if path]:
    for value in (None, 3, "x", [], {}, [[]], True):
      parent = spoilt = copy.deepcopy([memory, asked])
      for key in path[:-1]:
        parent = parent[key]
      parent[path[-1]] = value
      message = _refusal(spoilt)
      assert not message or ("not a PerLTQA file" in message and message.startswith(("mem.json", "qa.json"))), path
      refused += bool(message)
  assert refused > 100


def test_either_file_names_both(memory, asked, tmp_path):
  (tmp_path / "perltmem_x.json").write_text(json.dumps(memory), encoding="utf-8")
  with pytest.raises(ValueError, match=r"no file at .*perltqa_x"):
    perltqa.read(tmp_path / "perltmem_x.json")
  (tmp_path / "perltqa_x.json").write_text(json.dumps(asked), encoding="utf-8")
  first, second = (perltqa.read(tmp_path / f"{name}_x.json") for name in ("perltmem", "perltqa"))
  assert first == second
  assert len(first[0][0].questions) == 4
  (tmp_path / "other.json").write_text("{}", encoding="utf-8")
  with pytest.raises(ValueError, match="neither 'perltmem' nor 'perltqa'"):
    perltqa.read(tmp_path / "other.json")
  (tmp_path / "perltqa_x.json").write_text(json.dumps(asked)[:-30], encoding="utf-8")
  with pytest.raises(ValueError, match=r"perltqa_x\.json: not a PerLTQA file: broken or cut JSON at line 1"):
    perltqa.read(tmp_path / "perltmem_x.json")


@pytest.mark.parametrize(
  ("text", "date"),
  [
    ("May 12, 2022", "2022-05-12"),
    ("Sept. 3 1999", "1999-09-03"),
    ("2022-05-12 10:00", "2022-05-12T10:00"),
    ("2022-05-12", "2022-05-12"),
    ("2018", ""),
    ("73 BC", ""),
    ("during an election", ""),
    ("February 30, 2022", ""),
    ("Foo 3, 2022", ""),
    ("", ""),
  ],
)
def test_loose_dates(text, date):
  assert dates.loose(text) == date


def test_real_samples(shared_data):
  (episode,), report = perltqa.read(shared_data / "perltqa" / "perltmem_en_v2.sample.json")
  assert report.questions == {"profile": 13, "social_relationship": 17, "events": 24, "dialogues": 29}
  kinds = [session.id for session in episode.history.sessions]
  assert (sum("#" in name for name in kinds), len(kinds)) == (7, 2 + 9 + 7)
  assert all(question.evidence for question in episode.questions)
  assert {change: len(places) for change, places in report.changes.items()} == {Change.UNDATED: 2, Change.NUMBER: 1}


def test_every_reader_says_its_kinds_and_whether_it_has_notes():
  for reader in benchmarks.READERS.values():
    assert len(set(reader.KINDS)) == len(reader.KINDS) > 3
    assert isinstance(reader.NOTES, bool)
