"""The schema, the recipes in configs/, and the check that reports every problem at once."""

import itertools
import pathlib

import pytest
from ml_collections import ConfigDict

from attrimem_jax import config as schema
from attrimem_jax import validation
from attrimem_jax.nn.config import DecoderConfig

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
RECIPES = sorted(path.name for path in (REPOSITORY / "configs").glob("*.py"))
GRPO_PRESETS = ("", "embedded", "smollm2", "qwen3_0_6b", "qwen3_4b")
PRESETS = {
  "sft.py": ("", "policy", "answer", "dates", "refresh", "smollm2"),
  "retention.py": ("", "blind", "oracle"),
  "study_granularity.py": ("", "credit", "doubts", "masks", "warm", "kinds", "weight"),
  "serve.py": ("", "embedded", "smollm2"),
  "attribute.py": ("", "embedded", "smollm2", "qwen3_0_6b"),
}


def _recipe(name, preset=""):
  return schema.recipe(REPOSITORY / "configs" / name, preset)


def _keys(config, prefix=""):
  for key, value in config.items():
    if isinstance(value, ConfigDict):
      yield from _keys(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}"


def _problems(config, **arguments):
  """The numbered lines of the error, or [] where the configuration is fine."""
  try:
    validation.validate(config, **arguments)
  except ValueError as error:
    return str(error).splitlines()[1:]
  return []


@pytest.fixture
def config():
  """A valid configuration with numbers of its own, so that tuning a recipe touches no test of the checks."""
  config = schema.default()
  config.train.steps = 40
  config.rollout.histories = 4
  config.rollout.horizon.sessions = 2
  config.data.synthetic.sessions = (2, 4)
  config.policy.max_prompt = config.answer.max_context = 1024
  config.rollout.max_new_tokens = config.answer.max_new_tokens = 32
  return config


@pytest.fixture
def data_file(tmp_path):
  file = tmp_path / "locomo.json"
  file.write_text("[]")
  return str(file)


CASES = [(name, preset) for name in RECIPES for preset in PRESETS.get(name, GRPO_PRESETS)]


@pytest.mark.parametrize(("name", "preset"), CASES)
def test_every_recipe_is_valid_locked_and_of_the_schema(name, preset, data_file):
  config = _recipe(name, preset)
  assert set(_keys(config)) == set(_keys(schema.default()))
  assert config.is_locked
  assert config.rl.is_locked
  config.data.path = config.explain.path = data_file
  validation.validate(config)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_how_to_run_it(name):
  text = (REPOSITORY / "configs" / name).read_text()
  assert f"python -m attrimem_jax.main --config=configs/{name}" in text


@pytest.mark.parametrize("name", RECIPES)
def test_an_unknown_preset_lists_the_known_ones(name):
  with pytest.raises(ValueError, match=r"Unknown preset 'gpt5'\. Use one of ") as caught:
    _recipe(name, "gpt5")
  for preset in filter(None, PRESETS.get(name, GRPO_PRESETS)):
    assert repr(preset) in str(caught.value)


def _differences(name, preset=""):
  ours, base = _recipe(name, preset), _recipe("grpo_token.py", preset)
  return {
    key: validation.get(ours, key) for key in _keys(ours) if validation.get(ours, key) != validation.get(base, key)
  }


@pytest.mark.parametrize("preset", GRPO_PRESETS)
def test_variants_differ_from_the_token_recipe_in_one_place(preset):
  assert _differences("grpo_outcome.py", preset) == {"attribution.unit": "none", "rl.lambda_": 0.0}
  assert _differences("grpo_action.py", preset) == {"attribution.unit": "action"}
  assert _differences("export.py", preset) == {"job": "export"}


def test_the_paper_preset_holds_the_published_values():
  """FACTS of arXiv 2607.21106 v2, and MemBuilder's values where that paper is silent."""
  config = _recipe("grpo_token.py", "qwen3_4b")
  prompts = config.rollout.histories * config.rollout.horizon.sessions * len(config.rollout.modules)
  assert prompts * config.rollout.group_size == 256
  assert (config.rollout.group_size, config.train.steps, config.optim.lr) == (8, 400, 1e-6)
  assert config.attribution.masks == ((0, 8), (80, 16), (200, 32))
  assert (config.attribution.alpha, config.attribution.penalty, config.attribution.keep) == (0.01, "raw", 0.5)
  assert (config.rl.kl, config.rl.clip_low, config.rl.clip_high) == (0.02, 0.2, 0.2)
  assert config.answer.retriever.top_k == 10
  assert _problems(config, devices=8)[0].startswith("  1. config.data.path")  # the only thing missing is the file
  assert len(_problems(config, devices=8)) == 1


def test_recipes_do_not_share_state():
  first = _recipe("grpo_token.py")
  first.rl.kl = 0.5
  assert _recipe("grpo_token.py").rl.kl == 0.02


def test_a_misspelt_key_is_refused_with_the_known_ones(config):
  with pytest.raises(AttributeError, match="lambda_"):
    config.rl.lamda = 0.3


def test_types_are_kept(config):
  config.optim.lr = 1
  assert config.optim.lr == 1.0
  with pytest.raises(TypeError):
    config.optim.lr = "1e-6"
  with pytest.raises(TypeError):
    config.train.steps = 4.0


@pytest.mark.parametrize(("name", "most"), list(validation._AT_MOST.items()))
def test_a_number_above_its_most_is_named(config, name, most):
  _set(config, name, most + 1)
  assert any(f"config.{name}: must be at most {most:,} (got {most + 1})" in line for line in _problems(config))


@pytest.mark.parametrize(
  ("folders", "given", "message"),
  [
    ((), "none", "there is no such run directory"),
    (("run",), "run", "holds no folder checkpoints"),
    (("run/checkpoints",), "run/checkpoints", "Give {}/run."),
    (("run/checkpoints",), "run", None),
    ((), "~no-such-user/run", "there is no such run directory"),
  ],
)
def test_a_checkpoint_is_a_run_directory(config, tmp_path, folders, given, message):
  for folder in folders:
    (tmp_path / folder).mkdir(parents=True)
  config.policy.checkpoint = given if given.startswith("~") else str(tmp_path / given)
  problems = _problems(config)
  assert [message.format(tmp_path) in problem for problem in problems] == [True] if message else problems == []


@pytest.mark.parametrize(
  ("file", "text", "message"),
  [
    ("missing.py", None, "No recipe at"),
    ("notes.txt", "hello", "is not a Python file"),
    ("empty.py", "x = 1", "has no get_config"),
    ("plain.py", "get_config = 3", "has no get_config"),
    ("cut.py", "def get_config(", "cannot be run as a recipe: '\\(' was never closed"),
    ("undefined.py", "x = nothing", "cannot be run as a recipe: name 'nothing' is not defined"),
    ("none.py", "def get_config(preset): pass", "get_config of .* returns a NoneType: start from"),
    ("narrow.py", "def get_config(): pass", r"get_config\(''\) of .* fails: TypeError: get_config\(\) takes 0"),
    ("typo.py", "def get_config(preset): return nothing", "fails: NameError: name 'nothing' is not defined"),
  ],
)
def test_what_is_no_recipe_is_refused(tmp_path, file, text, message):
  if text is not None:
    (tmp_path / file).write_text(text)
  with pytest.raises(ValueError, match=message):
    schema.recipe(tmp_path / file)


def test_every_checked_name_is_a_key_and_every_number_is_checked():
  keys = set(_keys(schema.default()))
  checked = [validation.CHOICES, validation._AT_LEAST, validation._AT_MOST, validation._UNIT_INTERVAL]
  for table in checked:
    assert set(table) <= keys
  numbers = {key for key in keys if type(validation.get(schema.default(), key)) in (int, float)}
  assert numbers == set(validation._AT_LEAST) | set(validation._UNIT_INTERVAL)


def test_every_default_word_is_a_choice():
  config = schema.default()
  words = {key for key in _keys(config) if isinstance(validation.get(config, key), str)}
  free = {
    "data.path",
    "data.splits",
    "policy.model",
    "policy.checkpoint",
    "answer.model",
    "answer.retriever.model",
    "sft.path",
    "sft.tokenizer",
  }
  free |= {"eval.answers", "eval.memories", "serve.host"}
  free |= {
    f"{e}.{n}"
    for e in ("eval.judge", "answer.endpoint", "sft.teacher")
    for n in ("url", "model", "key_env", "parameters", "cache")
  }
  free |= {"explain.path", "explain.context", "explain.question", "explain.answer", "explain.part"}
  assert words == set(validation.CHOICES) | free | {"answer.retriever.instruction", "export.out", "hosts.coordinator"}


@pytest.mark.parametrize("name", sorted(validation.CHOICES))
def test_an_unknown_word_names_the_allowed_ones(config, name):
  _set(config, name, "nonsense")
  lines = [line for line in _problems(config) if f"config.{name}: unknown value (got 'nonsense')" in line]
  assert len(lines) == 1
  assert ", ".join(validation.CHOICES[name]) in lines[0]


@pytest.mark.parametrize(("name", "least"), list(validation._AT_LEAST.items()))
def test_a_number_below_its_least_is_named(config, name, least):
  _set(config, name, type(validation.get(config, name))(least - 1))
  assert any(f"config.{name}: must be a finite number of at least {least}" in line for line in _problems(config))


@pytest.mark.parametrize(
  ("name", "value"), list(itertools.product(validation._UNIT_INTERVAL, (-0.1, 1.1, float("nan"))))
)
def test_a_number_outside_the_unit_interval_is_named(config, name, value):
  _set(config, name, value)
  assert any(f"config.{name}: must lie in" in line for line in _problems(config))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(config, value):
  config.optim.lr = value
  assert any("config.optim.lr" in line for line in _problems(config))


def _set(config, name, value):
  *sections, key = name.split(".")
  for section in sections:
    config = config[section]
  config[key] = value


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attribution.masks": ()}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": (8, 16)}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((10, 8),)}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((0, 8), (80, 8))}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((0, 16), (80, 8))}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((0, 8), (0, 16))}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((0, 1),)}, "config.attribution.masks: must be pairs"),
    ({"attribution.masks": ((0, 8.0),)}, "config.attribution.masks: must be pairs"),
    ({"attribution.explain": "answer"}, "config.attribution.explain: unknown value (got 'answer')"),
    ({"attribution.unit": "none"}, "config.rl.lambda_: weighs a process reward"),
    ({"rollout.temperature": 0.0}, "config.rollout.temperature: makes all rollouts of a group equal"),
    ({"rollout.modules": ()}, "config.rollout.modules: must be different known modules"),
    ({"rollout.modules": ("core", "core")}, "config.rollout.modules: must be different known modules"),
    ({"rollout.modules": ("core", "visual")}, "Choose from core, episodic, semantic, procedural."),
    ({"rollout.horizon.sessions": 5}, "config.rollout.horizon.sessions: no history is that long"),
    ({"rollout.horizon.sessions": 0, "rollout.horizon.bank": "reference"}, "config.rollout.horizon.bank: a whole"),
    ({"data.synthetic.sessions": (3, 2)}, "config.data.synthetic: WorldConfig.sessions is (3, 2)"),
    ({"data.synthetic.sessions": (3,)}, "config.data.synthetic: "),
    ({"answer.retriever.name": "dense"}, "config.answer.retriever.model: a dense retriever needs an embedding model"),
    ({"policy.max_prompt": 600}, "config.policy.max_prompt: leaves no room for a session"),
    ({"policy.model": "./nowhere"}, "config.policy.model: there is no such file or folder (got './nowhere')"),
    ({"answer.model": "nowhere.gguf"}, "config.answer.model: there is no such file or folder"),
    ({"policy.checkpoint": "runs/none"}, "config.policy.checkpoint: there is no such run directory (got 'runs/none')"),
    ({"optim.warmup": 41}, "config.optim.warmup: is longer than config.train.steps=40"),
    ({"rl.micro_batches": 3}, "config.rl.micro_batches: does not divide the 8 sessions of a step (got 3)"),
    ({"mesh.data": 8, "rl.micro_batches": 2}, "leaves micro-batches of 4 sessions, which do not split over 8 devices"),
    ({"reward.kinds": ("temporel",)}, "config.reward.kinds: 'temporel' is no kind of question of this data set"),
    ({"data.kinds": ("temporel",)}, "config.data.kinds: 'temporel' is no kind of question of this data set"),
    ({"data.name": "locomo"}, "config.data.path: data set 'locomo' needs a file"),
    ({"data.name": "locomo", "data.path": "none.json"}, "config.data.path: there is no file at 'none.json'"),
    ({"data.name": "locomo", "data.split": "eval"}, "config.data.split: locomo is cut in two by config.data.holdout"),
    ({"job": "sft", "sft.init.kv_heads": 3}, "config.sft.init.kv_heads: does not divide config.sft.init.heads=4"),
    ({"lora.rank": 0}, "config.lora.rank: must be a finite number of at least 1 (got 0)"),
    ({"lora.alpha": 0.0}, "config.lora.alpha: must be a finite number of at least 1e-06 (got 0.0)"),
    ({"lora.alpha": float("nan")}, "config.lora.alpha: must be a finite number of at least"),
    (
      {"lora.targets": ("q", "embed")},
      "config.lora.targets: must be different matrices of a layer (got ('q', 'embed'))",
    ),
    ({"lora.targets": ("q", "q")}, "Choose from q, k, v, o, gate, up, down, or use () to train all weights."),
    ({"lora.targets": ("q",), "optim.name": "muon"}, "config.optim.name: orthogonalises whole matrices"),
    ({"lora.targets": ("q",), "job": "sft", "sft.from_scratch": True}, "config.sft.from_scratch: would freeze random"),
    ({"job": "sft", "sft.init.head_size": 33}, "config.sft.init.head_size: rotary positions turn pairs"),
  ],
)
def test_values_that_contradict_each_other(config, monkeypatch, changes, message):
  monkeypatch.delenv("ATTRIMEM_DATA", raising=False)
  for name, value in changes.items():
    _set(config, name, value)
  assert any(message in line for line in _problems(config)), _problems(config)


def test_the_data_file_may_come_from_the_environment(config, monkeypatch, data_file):
  config.data.name = "locomo"
  monkeypatch.setenv("ATTRIMEM_DATA", data_file)
  assert _problems(config) == []


def test_a_job_is_not_held_to_what_it_does_not_use(config, monkeypatch):
  monkeypatch.delenv("ATTRIMEM_DATA", raising=False)
  config.job = "export"
  config.data.name = "locomo"
  config.rl.micro_batches = 3
  assert _problems(config) == []


@pytest.mark.parametrize(
  ("axes", "devices", "fine"), [((1, 1, 1), 8, True), ((2, 4, 1), 8, True), ((2, 1, 1), 8, False)]
)
def test_the_mesh_fits_the_devices(config, axes, devices, fine):
  config.mesh.data, config.mesh.fsdp, config.mesh.tensor = axes
  lines = _problems(config, devices=devices)
  assert (lines == []) == fine
  assert fine or "config.mesh: the axes multiply to 2, but there are 8 devices" in lines[0]


def test_all_problems_come_at_once_numbered(config):
  config.rl.kl = -1.0
  config.reward.kind = "bleu"
  config.optim.warmup = 1000
  with pytest.raises(ValueError, match="3 problems in the configuration:") as caught:
    validation.validate(config)
  lines = str(caught.value).splitlines()
  assert [line.split(":")[0] for line in lines[1:]] == [
    "  1. config.reward.kind",
    "  2. config.rl.kl",
    "  3. config.optim.warmup",
  ]


def _decoder(max_positions):
  sizes = {"vocab_size": 8, "width": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_size": 8, "hidden": 8}
  return DecoderConfig(**sizes, max_positions=max_positions)


def test_prompt_and_completion_fit_the_models(config):
  room = config.policy.max_prompt + config.rollout.max_new_tokens
  validation.validate_lengths(config, _decoder(room))
  validation.validate_lengths(config, _decoder(room), _decoder(room))
  with pytest.raises(ValueError, match="2 problems") as caught:
    validation.validate_lengths(config, _decoder(room - 1), _decoder(20))
  assert f"makes {room} tokens, but the policy model has {room - 1} positions" in str(caught.value)
  assert f"Use at most {config.policy.max_prompt - 1}." in str(caught.value)
  assert "Lower config.answer.max_new_tokens." in str(caught.value)


@pytest.mark.parametrize(
  ("job", "weight", "refused"), [("train", 0.3, True), ("attribute", 0.3, True), ("train", 0.0, False)]
)
def test_rounded_weights_never_explain_an_answer(config, job, weight, refused):
  config.job, config.rl.lambda_, config.answer.weights = job, weight, "int8"
  found = [line for line in _problems(config) if "config.answer.weights" in line]
  assert bool(found) == refused
  assert all("log-probabilities" in line for line in found)
