"""The library's front door, with tiny random models on the shipped tokenizer: they write noise, but it is traced."""

import dataclasses
import datetime
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import attrimem_jax
from attrimem_jax import agent as agents
from attrimem_jax.io.models import LanguageModel
from attrimem_jax.memory import bank as banks
from attrimem_jax.memory.actions import Op, parse, render
from attrimem_jax.memory.prompts import COMPACT
from attrimem_jax.nn import decoder
from attrimem_jax.nn.config import DecoderConfig
from attrimem_jax.text.spans import pieces
from attrimem_jax.text.tokenizer import Tokenizer
from attrimem_jax.types import CallKey, Finish, History, Module, Question, Session, Turn

TOKENIZER = pathlib.Path(attrimem_jax.__file__).parent / "assets" / "tokenizer"
HI = [("Ann", "Hi")]
TALK = [("2024-03-04", [("Ann", "I moved to <Lisbon>."), ("Bot", "Nice!")]), ("2024-03-09", [("Ann", "I love tea.")])]


@pytest.fixture(scope="module")
def model():
  tokenizer = Tokenizer.load(TOKENIZER)
  shape = DecoderConfig(tokenizer.vocab_size, 16, 1, 2, 1, 8, 16, max_positions=512)
  return LanguageModel("tiny", shape, decoder.init(shape, jax.random.key(0)), tokenizer)


@pytest.fixture(scope="module")
def agent(model):
  agent = attrimem_jax.load(model, model)
  sampling = dataclasses.replace(agent.writer.sampling, max_new_tokens=8)
  writer = dataclasses.replace(agent.writer, sampling=sampling, step=64)
  return dataclasses.replace(agent, writer=writer, reader=dataclasses.replace(agent.reader, max_new_tokens=4, step=64))


@pytest.fixture(scope="module")
def memory(agent):
  """A memory with two records that the policy's semantic call of the first session wrote, as far as anyone can tell."""
  written = agent.write(TALK)
  tokenizer, owner = agent.writer.model.tokenizer, CallKey("conversation", 0, 0, Module.SEMANTIC)
  lines = "".join(f"{render(Op.ADD, text=text)}\n" for text in ("Ann lives in <Lisbon> 🦜", "Ann loves tea"))
  actions = parse(tokenizer.encode(lines), tokenizer, Module.SEMANTIC, Finish.STOP)
  bank, _ = banks.apply_all(banks.Bank.empty(), actions, module=Module.SEMANTIC, date="2024-03-04", owner=owner)
  return dataclasses.replace(written, rollout=dataclasses.replace(written.rollout, bank=bank))


@pytest.fixture(scope="module")
def reply(memory):
  return memory.ask("Where does Ann live?")


def test_importing_the_package_loads_no_jax():
  code = "import attrimem_jax, sys; assert 'jax' not in sys.modules; assert 'load' in dir(attrimem_jax)"
  subprocess.run([sys.executable, "-c", code], check=True, cwd=TOKENIZER.parents[2])


def test_unknown_names_of_the_package_are_attribute_errors():
  with pytest.raises(AttributeError, match="'attrimem_jax' has no attribute 'lode'"):
    _ = attrimem_jax.lode


def test_models_with_the_shipped_tokenizer_get_short_prompts(agent):
  assert agent.writer.prompts is agent.reader.prompts is COMPACT
  assert agent.reader.max_context == 256  # half of the model's positions
  assert "tiny" in repr(agent)
  assert "tiny" in agent._repr_html_()


def test_the_two_models_may_have_tokenizers_of_their_own(memory, model):
  spec = dict(model.tokenizer._spec)
  spec["model"] = spec["model"] | {"merges": []}  # every byte is a token
  bytewise = dataclasses.replace(model, name="odd", tokenizer=Tokenizer(spec, {"eos_token": "<|im_end|>"}))
  mixed = attrimem_jax.load(model, bytewise, COMPACT)
  reader = dataclasses.replace(mixed.reader, max_new_tokens=4)
  memory = dataclasses.replace(memory, agent=dataclasses.replace(mixed, reader=reader))
  reply = memory.ask("Where does Ann live?")
  assert reply.records == memory.records
  assert "] Ann lives in <Lisbon> 🦜\n" in bytewise.tokenizer.decode(reply.answer.prompt.tolist())
  found = reply.attribute(masks=8, alpha=1e-6)
  # A byte is no token of the policy's: it is removed with all the others of its token, which gets the whole weight.
  tokens = [(record.owner, record.start + i) for record in memory.records for i in range(len(record.ids))]
  policy = memory.agent.writer.model.tokenizer
  whole = [len(piece.text) for record in memory.records for piece in pieces(policy.pieces(record.ids))]
  assert len(found.weights) == len(whole) < len(tokens)  # the parrot is several tokens of one character
  shown = [weight for record in memory.records for weight in found.of(record)]
  assert None not in shown
  np.testing.assert_allclose(sum(shown), found.weights.sum(), rtol=1e-5)


def test_writing_calls_every_module_once_a_session(agent):
  written = agent.write(TALK, temperature=1.0, seed=3)
  assert len(written.rollout.calls) == len(TALK) * len(Module)
  assert written.bank is written.rollout.bank
  again = agent.write(TALK, temperature=1.0, seed=3)
  assert [c.completion.ids.tolist() for c in written.rollout.calls] == [
    c.completion.ids.tolist() for c in again.rollout.calls
  ]
  assert repr(written).startswith("Memory of 2 sessions: ")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"top_k": 0}, "top_k of load is 0: use a whole number, 1 or more"),
    ({"top_k": 2.5}, "top_k of load is 2.5"),
    ({"top_k": True}, "top_k of load is True"),
    ({"policy": None}, "policy is None: give a name"),
    ({"answer": 3}, "answer is 3: give a name"),
    ({"policy": ""}, "neither an existing folder"),
    ({"policy": "~nouser/x"}, "neither an existing folder"),
    ({"prompts": "compact"}, "prompts is 'compact': give memory.prompts.COMPACT"),
    ({"dtype": "int8"}, "dtype of load is 'int8': use one of float32, bfloat16"),
  ],
)
def test_bad_arguments_of_load(model, arguments, message):
  with pytest.raises(ValueError, match=message):
    attrimem_jax.load(**({"policy": model, "answer": model} | arguments))


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    *(({"temperature": value}, "0 <= temperature") for value in (-1, math.nan, math.inf, 1e-50, "1", None, True)),
    *(({"seed": value}, "seed of Agent.write is") for value in (-1, 2**32, 10**5000, 1.5, "1", None)),
  ],
)
def test_bad_arguments_of_write(agent, arguments, message):
  with pytest.raises(ValueError, match=message):
    agent.write(TALK, **arguments)


def test_a_memory_shows_its_records_escaped(memory):
  assert repr(memory).splitlines()[1:] == [
    "#1 [semantic] (2024-03-04) Ann lives in <Lisbon> 🦜",
    "#2 [semantic] (2024-03-04) Ann loves tea",
  ]
  shown = memory._repr_html_()
  assert "&lt;Lisbon&gt;" in shown
  assert "<Lisbon>" not in shown


def test_asking_and_attributing(memory):
  reply = memory.ask("Where does Ann live?")
  assert reply.records == memory.records
  assert reply.text in repr(reply)
  explanation = reply.attribute(masks=8, penalty="relative", alpha=0.01, seed=1)
  sources = sum(len(r.ids) for r in memory.records)
  assert explanation.weights.shape == (sources,)
  by_record = [explanation.of(record) for record in memory.records]
  assert [w for weights in by_record for w in weights] == explanation.weights.tolist()
  heaviest = explanation.top(sources)
  assert [abs(weight) for _, weight, _ in heaviest] == sorted((abs(w) for _, w, _ in heaviest), reverse=True)
  assert sum(weight for _, weight, _ in heaviest) == pytest.approx(explanation.weights.sum(), abs=1e-5)
  assert "have a weight" in repr(explanation)
  shown = explanation._repr_html_()
  assert "🦜" in shown
  assert "\N{REPLACEMENT CHARACTER}" not in shown.partition("<table")[2]  # an answer of noise may hold some
  assert "made this answer likelier" in shown


def test_the_same_seed_gives_the_same_attribution(memory):
  reply = memory.ask("Where does Ann live?")
  one, other, third = (reply.attribute(gradients=0, masks=8, seed=seed) for seed in (1, 1, 2))
  np.testing.assert_array_equal(one.weights, other.weights)
  assert not np.array_equal(one.attribution.measured.masks, third.attribution.measured.masks)


def test_every_scorer_starts_from_the_same_whole_text(memory):
  """With nothing removed there is nothing to hide, so the scorers agree on what they explain."""
  reply = memory.ask("Where does Ann live?")
  whole = []
  for scorer in ("exact", "masked", "cached"):
    measured = reply.attribute(gradients=0, masks=3, keep=1 - 1e-9, scorer=scorer).attribution.measured
    assert measured.masks.all()
    whole.append(measured.logp)
  np.testing.assert_allclose(whole[1:], [whole[0]] * 2, atol=1e-4)


def test_a_question_of_a_data_set_shows_its_right_answers(memory):
  reply = memory.ask(Question("q", "Where?", ("<Lisbon>",), "single-session"))
  assert "(right: &lt;Lisbon&gt;)" in reply._repr_html_()


def test_an_empty_memory_answers_but_has_nothing_to_explain(memory):
  empty = dataclasses.replace(memory, rollout=dataclasses.replace(memory.rollout, bank=banks.Bank.empty()))
  assert repr(empty) == "Memory of 2 sessions: 0 records, 0 tokens"
  assert "no record" in empty._repr_html_()
  with pytest.raises(ValueError, match="nothing to attribute"):
    empty.ask("Where does Ann live?").attribute()


def test_a_given_record_is_shown_without_weights(memory):
  given = dataclasses.replace(memory.records[0], id=0, owner=None)
  bank = banks.Bank((given, *memory.records), memory.bank.next_id)
  both = dataclasses.replace(memory, rollout=dataclasses.replace(memory.rollout, bank=bank))
  explanation = both.ask("Where does Ann live?").attribute(masks=4)
  assert explanation.of(given) == [None] * len(given.ids)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    *(({"masks": value}, "masks of Reply.attribute is .* 2 or more") for value in (1, 2.5, "x")),
    *(({"gradients": value}, "gradients of Reply.attribute is .* 0 to 5") for value in (-1, 6, 1.5, None)),
    ({"scorer": "exact"}, "with gradients is 'exact': use one of masked, cached"),
    *(({"keep": value}, "0 < keep < 1") for value in (0.0, 1.0, math.nan, "x")),
    *(({"alpha": value}, "0 < alpha") for value in (0.0, -1, math.nan, math.inf, 1e-50, "x")),
    *(({"seed": value}, "0 to 4294967295") for value in (-1, 2**32, 0.5)),
    *(({"penalty": value}, "one of raw, context_cite, relative, held_out") for value in ("l2", None)),
    *(({"scorer": value}, "one of (exact, )?masked, cached") for value in ("x", 3)),
  ],
)
def test_bad_arguments_of_attribute(reply, arguments, message):
  with pytest.raises(ValueError, match=message):
    reply.attribute(**arguments)


@pytest.mark.parametrize(
  ("question", "date", "message"),
  [
    ("", "", "is empty"),
    ("  ", "", "is empty"),
    (None, "", "is None: give a text or a Question"),
    (3, "", "is 3: give a text or a Question"),
    ("Where \ud800?", "", "no Unicode character"),
    ("Where?", "yesterday", "Memory.ask has the date 'yesterday': write 2024-03-04 or"),
    ("Where?", None, "Memory.ask has the date None"),
    (Question("q", "Where?", (), "", date="May"), "", "the question given to Memory.ask has the date 'May'"),
    (Question("q", 3, (), ""), "", "is 3: give a text"),
  ],
)
def test_bad_questions(memory, question, date, message):
  with pytest.raises(ValueError, match=message):
    memory.ask(question, date)


@pytest.mark.parametrize("date", ["2024-03-04", "2024-03-04T18:30", datetime.date(2024, 3, 4)])
def test_a_question_has_a_date(memory, date):
  assert memory.ask("Where?", date).answer.question.date[:10] == "2024-03-04"


def test_plain_data_becomes_a_history():
  history = agents.as_history(
    [(datetime.date(2024, 3, 4), [("Ann", "Hi")]), ("2024-03-04T18:30", [("", "Bye")]), ("", [("Ann", "?")])]
  )
  assert [s.date for s in history.sessions] == ["2024-03-04", "2024-03-04T18:30", ""]
  assert [t.id for s in history.sessions for t in s.turns] == ["S1:1", "S2:1", "S3:1"]
  assert agents.as_history(history) == history
  assert agents.as_history(history.sessions).sessions == history.sessions


@pytest.mark.parametrize(
  ("sessions", "message"),
  [
    ("Ann: hi", "give a list of"),
    ([], "has no session"),
    (["hello"], "session 1 of the history is 'hello': give"),
    ([("2024-03-04", [("Ann", 3)])], "all of them strings"),
    ([("2024-03-04", [])], "has no lines"),
    ([("4 March", [("Ann", "Hi")])], "the date '4 March': write 2024"),
    ([("2024-03-04", [("Ann", "Hi")]), ("2024-03-01", [("Ann", "Hi")])], "session S2 of 2024-03-01 comes after"),
    ([("2024-03-04", ["ab", "cd"])], "all of them strings"),
    ([("2024-03-04", [("Ann", "\ud800")])], "the text of line 1 in session 1 of the history holds"),
    ([("2024-03-04T18:00", HI), ("2024-03-04", HI), ("2024-03-04T09:00", HI)], "session S3 of .* comes after"),
    (None, "a history is a NoneType: give a list of"),
    ([Session("a", "4 March", (Turn("Ann", "Hi"),))], "session 1 of the history has the date '4 March': write 2024"),
    ([Session("a", "", ())], "has no lines"),
    ([Session("a", "", "hi")], "the turns of session 1 of the history are 'hi': give a tuple of Turn"),
    ([Session("a", "", (Turn("Ann", "\ud800"),))], "the text of line 1 in session 1 of the history holds"),
    ([Session("a", "", (Turn(3, "Hi"),))], "the speaker of line 1 in session 1 of the history is 3: give a text"),
    (History("h", ()), "has no session"),
    (History("h", (Session("a", "May", (Turn("Ann", "Hi"),)),)), "has the date 'May'"),
    (History("h", tuple(Session(d, d, (Turn("A", "B"),)) for d in ("2024-03-02", "2024-03-01"))), "sort the history"),
    (History(3, (Session("a", "", (Turn("Ann", "Hi"),)),)), "the id of the history is 3"),
  ],
)
def test_malformed_histories(sessions, message):
  with pytest.raises(ValueError, match=message):
    agents.as_history(sessions)


def test_the_example_of_the_readme_writes_answers_and_explains():
  readme = (pathlib.Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
  code = next(part for part in readme.split("```python\n")[1:] if "agent.write" in part).partition("```")[0]
  names: dict = {}
  exec(code, names)
  assert [record.text for record in names["memory"].records] == ["Ann lives in Lisbon", "Ann visited the zoo"]
  assert names["reply"].text == "Ann lives in Lisbon."
  assert names["reply"].attribute().top(1)[0][0].strip() == "Lisbon"
