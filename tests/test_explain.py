"""Explaining answers by any text: parts that tile it, weights that find the part that matters, clear errors."""

import json

import numpy as np
import pytest

import attrimem_jax
from attrimem_jax import config as schema
from attrimem_jax.explain import _sources
from attrimem_jax.io import models
from attrimem_jax.jobs.attribute import read_cases, run_attribute
from attrimem_jax.jobs.run import Run
from attrimem_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(models.SHIPPED_TOKENIZER)
TEXT = "[2024-03-05] Ann lives in Lisbon\n[2024-04-01] Bob plays the harp"
QUESTION, ANSWER = "Where does Ann live?", "Ann lives in Lisbon."


def tile(text: str, sources) -> tuple[list[int], tuple[str, ...], list[bytes]]:
  tokens = TOKENIZER.pieces(TOKENIZER.encode(text))
  source, parts = _sources(tokens, sources)
  assert len(source) == len(tokens)
  return source.tolist(), parts, tokens


@pytest.mark.parametrize(
  ("unit", "expected"),
  [
    ("word", ("A", " bc.", " D", "漢", "字")),
    ("sentence", ("A bc. ", "D\n", "漢字。", "x")),
    ("record", ("A bc. D\n", "漢字。x")),
    (["A b", "c. D\n漢字。", "x"], ("A b", "c. D\n漢字。", "x")),
  ],
)
def test_parts_tile_the_text(unit, expected):
  text = "A bc. D\n漢字" if unit == "word" else "A bc. D\n漢字。x"
  _, parts, _ = tile(text, unit)
  assert parts == expected


@pytest.mark.parametrize("unit", ["token", "word", "sentence", "record"])
@pytest.mark.parametrize("text", [TEXT, "a\n\n\nb", "🦜 one. 漢字。two!\nthree", "  lead", "end \n"])
def test_every_token_belongs_to_the_part_that_it_starts_in(unit, text):
  source, parts, tokens = tile(text, unit)
  assert sorted(set(source) - {-1}) == list(range(len(parts)))
  owned = [s for s in source if s >= 0]
  assert owned == sorted(owned)
  for token, part in zip(tokens, source, strict=True):
    if part >= 0 and token.decode(errors="ignore").strip():
      assert token.decode(errors="ignore").strip()[:1] in parts[part] or unit == "token"
    elif part < 0:
      assert not token.strip(b"\n\r")


@pytest.fixture(scope="module")
def explained():
  return attrimem_jax.attribute(TEXT, QUESTION, ANSWER, sources="record", masks=32, held_out=4)


def test_the_record_that_holds_the_answer_has_the_largest_weight(explained):
  assert explained.parts == ("[2024-03-05] Ann lives in Lisbon\n", "[2024-04-01] Bob plays the harp")
  assert explained.top(1)[0][0] == explained.parts[0]
  assert explained.weights[0] > 1
  assert explained.answer == ANSWER
  exact = attrimem_jax.attribute(
    TEXT, QUESTION, ANSWER, sources="record", gradients=0, masks=16, held_out=4, scorer="exact"
  )
  assert exact.top(1)[0][0] == explained.parts[0]
  assert exact.tokens_read < explained.tokens_read  # 16 masks there, 32 masks and gradients here
  np.testing.assert_allclose(explained.weights[0], exact.weights[0], rtol=0.2)


def test_what_is_saved_says_everything_and_is_escaped(explained, tmp_path):
  page = explained.save(tmp_path / "a" / "b")
  saved = json.loads((page.parent / "attribution.json").read_text(encoding="utf-8"))
  assert [part["text"] for part in saved["parts"]] == list(explained.parts)
  assert [part["weight"] for part in saved["parts"]] == pytest.approx(explained.weights.tolist())
  assert TOKENIZER.decode(saved["ids"]) == TEXT
  assert set(saved["faithfulness"]) == {"lds", "r2", "drops", "held_out_masks"}
  typed = attrimem_jax.attribute("<b>Ann</b> <|im_end|> lives in Lisbon", QUESTION, ANSWER, masks=8, held_out=2)
  text = typed.save(tmp_path).read_text()
  assert "<b>Ann" not in text
  assert TOKENIZER.control("<|im_end|>") not in typed.ids
  assert "rank correlation" in repr(typed)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"context": "  \n"}, "the context is '  \\n': give some text"),
    ({"context": []}, "the context is '': give some text"),
    ({"question": ""}, "the question is '': give some text"),
    ({"answer": " "}, "the answer is ' ': give some text"),
    ({"answer": "x " * 4000}, "shorten the context or the answer"),
    ({"context": "Ann \ud800 lives"}, "no Unicode character"),
    (
      {"sources": ["Ann"]},
      "the parts do not join to the text: they hold '' at character 3, the text ' lives in Lisbon",
    ),
    ({"sources": ["Ben", " lives in Lisbon"]}, "they hold 'Ben lives in Lisbon' at character 0"),
    ({"sources": "line"}, "use one of token, word, sentence, record"),
    *(({"context": value}, "the context is") for value in (None, 3, b"Ann", {"Ann": 1})),
    ({"context": [1, 2]}, "record 0 of the context is 1: give a text"),
    *(({"question": value}, "the question is") for value in (None, 3)),
    *(({"answer": value}, "the answer is") for value in (3, "", ["Ann"])),
    ({"answer": None, "context": "Ann lives in Lisbon " * 4000}, "shorten"),
    *(({"sources": value}, "use one of token, word, sentence, record") for value in (5, None, b"Ann")),
    ({"sources": ["Ann", 3]}, "part 1 of sources is 3: give a text"),
    ({"model": None}, "model of attribute is None: give a name"),
    ({"prompts": "full"}, "prompts is 'full'"),
    *(({"masks": value}, "masks of attribute is") for value in (1, 2.5, "8")),
    *(({"held_out": value}, "held_out of attribute is") for value in (1, None)),
    *(({"max_new_tokens": value}, "max_new_tokens of attribute is") for value in (0, 1.5)),
    *(({"keep": value}, "0 < keep < 1") for value in (1.0, float("nan"), "x")),
    *(({"alpha": value}, "0 < alpha") for value in (0, float("inf"))),
    *(({"seed": value}, "0 to 4294967295") for value in (-1, 2**64, 10**5000, "1")),
    ({"scorer": "x"}, "use one of masked, cached"),
    ({"penalty": "x"}, "use one of raw, context_cite, relative, held_out"),
    ({"dtype": "float8"}, "use one of float32, bfloat16"),
  ],
)
def test_bad_input(changes, message):
  given = {"context": "Ann lives in Lisbon", "question": QUESTION, "answer": ANSWER} | changes
  with pytest.raises(ValueError) as error:
    attrimem_jax.attribute(**given)
  assert message in str(error.value)


def test_a_bad_place_to_save(explained, tmp_path):
  (tmp_path / "file").write_text("")
  for folder in (None, 3):
    with pytest.raises(ValueError, match="folder of save is"):
      explained.save(folder)
  with pytest.raises(ValueError, match="cannot save to "):
    explained.save(tmp_path / "file")
  with pytest.raises(ValueError, match="count of top is -1"):
    explained.top(-1)


def _config(**explain):
  config = schema.recipe("configs/attribute.py")
  config.explain.update({"masks": 8, "held_out": 2, **explain})
  return config


def test_the_job_explains_every_case_and_goes_on_where_it_stopped(tmp_path, capsys, repository, monkeypatch):
  monkeypatch.chdir(repository)
  file = tmp_path / "cases.json"
  case = {"context": TEXT.split("\n"), "question": QUESTION, "answer": ANSWER}
  file.write_text(json.dumps([case, {"context": TEXT, "question": "What does Bob play?"}]))
  config = _config(path=str(file))
  with Run(config, str(tmp_path / "run")) as run:
    run_attribute(config, run)
  first = (tmp_path / "run" / "000" / "attribution.json").read_text()
  (tmp_path / "run" / "001" / "attribution.json").unlink()
  with Run(config, str(tmp_path / "run")) as run:
    run_attribute(config, run)
  assert "000 is there already" in capsys.readouterr().out
  assert (tmp_path / "run" / "000" / "attribution.json").read_text() == first
  second = json.loads((tmp_path / "run" / "001" / "attribution.json").read_text())
  assert (second["gradients"], second["masks"]) == (5, 8)
  assert np.isfinite([part["weight"] for part in second["parts"]]).all()


def test_words_of_an_answer_can_be_explained_alone():
  found = attrimem_jax.attribute(TEXT, QUESTION, ANSWER, sources="word", masks=64, held_out=4, part="Lisbon")
  assert (found.answer, found.part) == (ANSWER, "Lisbon")
  assert TOKENIZER.decode(found.attribution.problem.answer.tolist()).strip() == "Lisbon"
  assert found.top(1)[0][0].strip() == "Lisbon"
  assert "(of this: 'Lisbon')" in repr(found)
  with pytest.raises(ValueError, match="'Porto' does not stand in 'Ann lives in Lisbon"):
    attrimem_jax.attribute(TEXT, QUESTION, ANSWER, part="Porto")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda config: config.explain.update(question="Where does Bob live?"), "with another case.question"),
    (lambda config: config.explain.update(masks=16), "with another explain.masks"),
    (lambda config: config.update(seed=3), "with another seed"),
    (lambda config: config.answer.update(max_context=512), "with another answer.max_context"),
  ],
)
def test_an_attribution_of_something_else_is_not_passed_off_as_this_one(
  tmp_path, change, message, repository, monkeypatch
):
  monkeypatch.chdir(repository)
  (tmp_path / "notes.txt").write_text(TEXT)
  config = _config(context=str(tmp_path / "notes.txt"), question=QUESTION, answer=ANSWER)
  with Run(config, tmp_path / "run") as run:
    run_attribute(config, run)
  before = (tmp_path / "run" / "attribution.json").read_text()
  change(config)
  with Run(config, tmp_path / "run") as run, pytest.raises(ValueError, match=message):
    run_attribute(config, run)
  assert (tmp_path / "run" / "attribution.json").read_text() == before


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{", "is no JSON"),
    ("[]", "holds no case"),
    ("[3]", "case 0 of"),
    ('{"context": 3, "question": "x"}', "context is 3: give a text or a list of texts"),
    ('{"context": ["a", 3], "question": "x"}', "give a text or a list of texts"),
    ('{"context": "a"}', "question is None: give a text"),
    ('{"context": "a", "question": "b", "answer": 1}', "answer is 1: give a text"),
    ('{"context": "a", "question": "b", "answr": "c"}', "unknown key 'answr'"),
    ('{"context": "a", "question": "b\\ud800"}', "no Unicode character"),
    ("[" * 100_000, "nested too deeply"),
    ('{"context": "a", "question": "b", "part": 3}', "part is 3: give a text"),
    ('{"context": "a", "question": " ", "answer": "c"}', "question is ' ': give some text"),
    ('[{"context": "a", "question": "b"}, {"context": [" ", ""], "question": "b"}]', "case 1 of"),
  ],
)
def test_malformed_cases(tmp_path, content, message, repository, monkeypatch):
  monkeypatch.chdir(repository)
  file = tmp_path / "cases.json"
  file.write_text(content)
  with pytest.raises(ValueError) as error:
    read_cases(_config(path=str(file)))
  assert message in str(error.value)
