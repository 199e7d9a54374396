"""The configuration of every job: one locked schema, and the means to build recipes on it and on one another.

`default()` holds every key with its type and meaning. Recipes in `configs/` change values and never add keys; whether
the values make sense together is for `validation.validate`, which runs before any work starts.
"""

import importlib.util
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from attrimem_jax.types import Module


def default() -> ConfigDict:
  """Returns the whole schema, locked: a new key is an AttributeError that lists the known ones."""
  config = ConfigDict()
  config.job = "train"
  config.seed = 0
  config.data = _data()
  config.policy = _policy()
  config.answer = _answer()
  config.rollout = _rollout()
  config.reward = _reward()
  config.attribution = _attribution()
  config.explain = _explain()
  config.rl = _rl()
  config.optim = _optim()
  config.lora = _lora()
  config.train = _train()
  config.eval = _eval()
  config.sft = _sft()
  config.retention = _retention()
  config.study = ConfigDict({"arms": (), "seeds": 5})  # what is compared (`arms.ARMS`), and runs of each
  config.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})  # devices along each axis; the product is all used
  config.hosts = _hosts()
  config.plan = _plan()
  config.serve = _serve()
  config.export = ConfigDict({"out": "", "dtype": "float32", "verify": True})  # out "": <workdir>/export
  return config.lock()


def _data() -> ConfigDict:
  data = ConfigDict()
  data.name = "synthetic"
  data.path = ""  # file of a benchmark; "" takes it from the environment variable ATTRIMEM_DATA
  data.splits = ""  # JSON file {split: [conversation ids]} of a benchmark; "" cuts it in two by `holdout`
  data.split = "train"
  data.seed = 0  # of the synthetic world: another one has other people
  data.holdout = 2  # benchmark conversations, counted from the end, that training never sees
  data.kinds = ()  # question kinds to keep; () keeps all
  # Sizes of a synthetic history, each drawn from (low, high): sessions, then facts and lines of chatter of one session.
  data.synthetic = ConfigDict({"sessions": (2, 3), "facts": (2, 3), "chatter": (1, 2), "questions": (6, 8)})
  # How sloppy the oracle teacher is, as probabilities: it misses a fact, keeps chatter, blurs a number or name.
  data.teacher = ConfigDict({"miss": 0.0, "chatter": 0.0, "blur": 0.0})
  return data


def _policy() -> ConfigDict:
  policy = ConfigDict()
  policy.model = (
    "embedded:policy"  # embedded:<name>, a folder, a .gguf file, a name in third_party/models.toml or a hub id
  )
  policy.checkpoint = ""  # run directory whose newest parameters replace those of the model
  policy.prompts = "compact"
  policy.thinking = False
  policy.dtype = "float32"  # of the computation; parameters and moments are always float32
  policy.max_prompt = 1024  # tokens of session and module prompt together
  policy.overlong = "fail"  # what happens to a session that does not fit: fail, split it, or cut its oldest turns
  return policy


def _answer() -> ConfigDict:
  answer = ConfigDict()
  answer.model = "embedded:answer"
  answer.prompts = "compact"
  answer.dtype = "float32"
  answer.weights = "float"  # or "int8", "int4" (qwix) where only its words count: job evaluate, benchmark, rl.lambda_=0
  answer.max_context = 1024  # tokens of context and question together
  answer.max_new_tokens = 32
  answer.retriever = ConfigDict({"name": "bm25", "top_k": 10})
  answer.retriever.model = ""  # of the dense retriever, with the instruction that it was trained to read before a query
  answer.retriever.instruction = ""
  # Job "benchmark" can ask a model behind an endpoint instead; budgets still count tokens of `answer.model`.
  answer.endpoint = _endpoint('{"temperature": 0, "max_tokens": 64}')
  return answer


# How an endpoint is talked to, which changes nothing of what it says.
CONNECTION = ("url", "key_env", "concurrency", "timeout", "retries", "prices", "cache")


def _endpoint(parameters: str) -> ConfigDict:
  """A model behind an endpoint of OpenAI's form. What it replies is kept in a file and asked for once."""
  endpoint = ConfigDict()
  endpoint.url = ""  # with its /v1; "" uses none
  endpoint.model = ""
  endpoint.key_env = ""  # environment variable that holds the key; "" sends none
  endpoint.parameters = parameters  # of every request, as a JSON object
  endpoint.concurrency = 8  # requests under way at once
  endpoint.timeout = 120.0  # seconds of one try,
  endpoint.retries = 5  # and how many more there are
  endpoint.prices = ()  # money for a million tokens: (of prompts, of replies); () counts none
  endpoint.cache = ""  # the file, of JSON lines; "" is one in the run directory
  return endpoint


def _rollout() -> ConfigDict:
  rollout = ConfigDict()
  rollout.group_size = 8  # G, rollouts of the same history
  rollout.histories = 4  # P, histories per step
  rollout.modules = tuple(str(module) for module in Module)
  # sessions written per rollout (0: the whole history), and the bank that a window starts from.
  rollout.horizon = ConfigDict({"sessions": 0, "bank": "empty"})
  rollout.temperature = 1.0
  rollout.top_p = 1.0  # below 1 the sampler's support is smaller than the trainer's: the ratio is biased
  rollout.top_k = 0  # 0 is off; the same warning
  rollout.max_new_tokens = 64  # per call
  # Calls (histories x rollouts x modules) that are sampled together; the others wait until places get free. 0: all.
  rollout.at_once = 0
  rollout.core_budget = 128  # tokens that the core module may hold
  rollout.records_top_k = 20  # existing records shown to a module, best first,
  rollout.records_budget = 512  # within so many tokens
  rollout.bucket = 64  # lengths are padded to multiples of this, which bounds compilations
  return rollout


def _reward() -> ConfigDict:
  reward = ConfigDict()
  reward.kind = "contains"
  reward.questions = 4  # asked per history; 0 asks them all
  reward.kinds = ()  # question kinds that training asks; () asks what data.kinds keeps, as evaluation always does
  return reward


def _attribution() -> ConfigDict:
  attribution = ConfigDict()
  attribution.masks = ((0, 8), (80, 16), (200, 32))  # (from step, masks); masks of a stage keep those of the one before
  attribution.gradients = 0  # 1 to 5: so many derivatives where the memory is faint, instead of random masks
  attribution.keep = 0.5  # probability that a source stays in the context
  attribution.alpha = 0.01  # LASSO penalty
  attribution.penalty = "raw"
  # Whose probability is explained: the answer given, the gold one, or gold against given where that was wrong.
  attribution.explain = "generated"
  # "exact" removes sources from the text, "masked" hides them, "cached" hides them in one reading of the context: much
  # cheaper, somewhat biased. Gradients need one of the latter two.
  attribution.scorer = "exact"
  attribution.unit = "token"
  attribution.gate = 0  # held-out masks that judge every attribution, whose credit is then scaled by its LDS; 0: none
  return attribution


def _explain() -> ConfigDict:
  explain = ConfigDict()
  explain.path = ""  # JSON: an object, or a list of them, with context, question and perhaps answer
  explain.context = ""  # or a text file, with the question and perhaps the answer beside it
  explain.question = ""
  explain.answer = ""  # "": what the model says
  explain.part = ""  # words of the answer that are explained; "": all of it
  explain.sources = "token"
  explain.masks = 0  # 0: 8 that give gradients their scale, 256 without gradients
  explain.held_out = 16  # masks that only judge the result
  return explain


def _hosts() -> ConfigDict:
  hosts = ConfigDict()
  # Where the first process listens, as "host:port"; "auto" takes all of it from Slurm, Open MPI, Kubernetes or a TPU
  # pod; "" is a single process. Defaults come from the environment, so that one command line serves all processes.
  hosts.coordinator = os.environ.get("ATTRIMEM_COORDINATOR", "")
  hosts.processes = _from_environment("ATTRIMEM_PROCESSES", 0)
  hosts.process = _from_environment("ATTRIMEM_PROCESS", -1)  # number of this one, from 0
  hosts.timeout = 100  # seconds after which a process that is silent counts as lost
  return hosts


def _from_environment(name: str, default: int) -> int:
  value = os.environ.get(name) or default
  try:
    return int(value)
  except ValueError:
    raise ValueError(f"${name} is {value!r}: give a whole number, or unset it") from None


def _plan() -> ConfigDict:
  """What the job `plan` assumes: tokens (0: the most that the recipe allows), the share of peak rate and bandwidth."""
  return ConfigDict({"session": 0, "prompt": 0, "completion": 0, "context": 0, "answer": 0, "utilisation": 0.4})


def _rl() -> ConfigDict:
  rl = ConfigDict()
  rl.lambda_ = 0.3  # weight of the process advantage; 0 is outcome-only
  rl.normalise = "zscore"  # of process rewards, over the sources of a group
  rl.clip_process = 5.0
  rl.clip_low = 0.2
  rl.clip_high = 0.2
  rl.kl = 0.02  # towards the starting policy, by the k3 estimator
  rl.loss_norm = "token"
  rl.drop_flat_groups = False  # leave out groups of equal rewards altogether, their KL term included
  rl.redraw = 0  # times that a step with flat groups draws other histories, whose groups take their places
  rl.micro_batches = 1
  rl.remat = False  # recompute activations in the backward pass: less memory, a third more work
  return rl


def _optim() -> ConfigDict:
  optim = ConfigDict()
  optim.name = "adamw"  # or "muon": half the steps from scratch
  optim.lr = 1e-6
  optim.schedule = "constant"
  optim.final_fraction = 0.1  # of lr, where the cosine ends
  optim.warmup = 0  # steps
  optim.weight_decay = 0.0
  optim.clip_norm = 1.0
  optim.b1 = 0.9
  optim.b2 = 0.999
  optim.eps = 1e-8
  return optim


def _lora() -> ConfigDict:
  """Low-rank factors beside frozen weights are trained instead of the weights, if any targets are named."""
  lora = ConfigDict()
  lora.targets = ()  # matrices of every layer: of q, k, v, o, gate, up, down; () trains all weights and has no factors
  lora.rank = 16
  lora.alpha = 32.0  # the product of the factors counts alpha / rank times
  return lora


def _train() -> ConfigDict:
  train = ConfigDict()
  train.steps = 400
  train.log_every = 1
  train.eval_every = 0  # 0: before the first and after the last step only
  train.checkpoint_every = 50
  train.keep_checkpoints = 2
  train.offload = False  # answer model and reference wait in host memory while a phase of a step does not use them
  # A run stops, and keeps the checkpoint before, when `patience` steps on end show the same sign of collapse: an
  # entropy below, a KL above, or a reward below these. Patience 0 never stops.
  train.collapse = ConfigDict({"patience": 0, "entropy": 0.01, "kl": 10.0, "reward": 0.0})
  return train


def _eval() -> ConfigDict:
  evaluation = ConfigDict()
  evaluation.episodes = 32
  evaluation.questions = 0  # asked per history; 0 asks them all
  evaluation.split = "test"
  evaluation.temperature = 0.0
  # Whose memories job "evaluate" asks: the policy's, the data set's reference notes, the careless teacher's, or none.
  evaluation.memory = "policy"
  # Whose memories job "benchmark" asks; or a finished run of it, whose memories are asked again; or a file of answers
  # in the benchmark's own format, which is only scored.
  evaluation.system = "policy"
  evaluation.memories = ""
  evaluation.answers = ""
  evaluation.window = 0  # tokens that whole conversations may fill; 0: all that the answer model can read
  evaluation.bootstrap = 1000  # resamples
  evaluation.confidence = 0.95
  # Judges the answers of job "benchmark" beside the string metrics. Its recall and specificity are measured on right
  # and on planted wrong answers to so many questions (0: not at all); where it gives no verdict it is asked again.
  evaluation.judge = _endpoint('{"temperature": 0, "max_tokens": 512}')
  evaluation.judge.calibration = 50
  evaluation.judge.tries = 3
  return evaluation


def _sft() -> ConfigDict:
  sft = ConfigDict()
  sft.task = "policy"  # write the teacher's actions, or answer from the reference memory
  # Expert trajectories to learn from instead of the synthetic teacher's: a file or folder of MemBuilder's
  # agent_calls.jsonl. Its last `data.holdout` conversations only tell the held-out loss.
  sft.path = ""
  # Or those that a model behind an endpoint writes for the first conversations of `data.split`, before the first step.
  sft.teacher = _endpoint('{"temperature": 0.7, "max_tokens": 1024}')
  sft.teacher.histories = 8
  sft.batch = 32  # examples per step
  # Shape of every batch: suffixes per prefix, and columns of prefix, prompt and completion; what is longer is left out.
  sft.widths = ConfigDict({"rows": 4, "prefix": 160, "prompt": 96, "completion": 32})
  sft.from_scratch = False  # random parameters of the shape below instead of those of the model
  sft.tokenizer = ""  # folder of the tokenizer that a model from scratch takes; "" is that of the shipped models
  sft.init = ConfigDict()
  sft.init.family = "qwen3"
  sft.init.width = 128
  sft.init.layers = 4
  sft.init.heads = 4
  sft.init.kv_heads = 2
  sft.init.head_size = 32
  sft.init.hidden = 384
  sft.init.rope_theta = 10_000.0
  sft.init.norm_eps = 1e-6
  sft.init.tied = True
  sft.init.qk_norm = True
  sft.init.qkv_bias = False
  sft.init.max_positions = 2048
  return sft


def _retention() -> ConfigDict:
  retention = ConfigDict()
  retention.regime = "blind"  # goal of a turn: what its session was about, or ("oracle") the question of the future
  retention.keep = 0.3  # share of the turns that is kept
  retention.turns = "all"  # or "user": only what the user said is ranked, so that who speaks explains nothing
  retention.splits = 20  # random halves that weights are learned on
  retention.cases = 0  # of the file's first cases only; 0 takes all
  return retention


def _serve() -> ConfigDict:
  serve = ConfigDict()
  serve.models = ("embedded:policy", "embedded:answer")  # as policy.model; clients call them by these names
  serve.host = "127.0.0.1"
  serve.port = 8000  # 0 takes a free one
  serve.queue = 256  # prompts that may wait; a request beyond them is refused with 429
  serve.batch = 16  # most prompts of one batch
  serve.max_new_tokens = 1024  # of a completion: the most that may be asked for, and what a chat gets that says nothing
  serve.body = 1_000_000  # bytes of a request
  serve.timeout = 600.0  # seconds from a request to its answer
  serve.grace = 30.0  # seconds that a stop waits for what has not begun
  serve.dtype = "float32"
  return serve


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """A nested mapping as one of dotted names: {"rl": {"kl": 0.02}} becomes {"rl.kl": 0.02}."""
  found: dict[str, Any] = {}
  for name, value in tree.items():
    found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
  return found


def recipe(file: str | os.PathLike[str], preset: str = "") -> ConfigDict:
  """Runs the recipe in `file` and returns its locked configuration; recipes use it to build on one another.

  Raises:
    ValueError: the file is missing, is no recipe, or has no such preset.
  """
  path = pathlib.Path(file)
  if not path.is_file():
    raise ValueError(f"No recipe at {str(path)!r}. Give the path of a file such as configs/grpo_token.py.")
  spec = importlib.util.spec_from_file_location(f"attrimem_recipe_{path.stem}", path)
  if spec is None or spec.loader is None:
    raise ValueError(f"{str(path)!r} is not a Python file. Give the path of a file such as configs/grpo_token.py.")
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except Exception as error:
    raise ValueError(f"{str(path)!r} cannot be run as a recipe: {error}") from error
  if not callable(getattr(module, "get_config", None)):
    raise ValueError(f"{str(path)!r} has no get_config(preset). Copy configs/grpo_token.py to start a recipe.")
  try:
    config = module.get_config(preset)
  except ValueError:  # of `choose`, or the recipe's own
    raise
  except Exception as error:
    raise ValueError(f"get_config({preset!r}) of {str(path)!r} fails: {type(error).__name__}: {error}") from error
  if not isinstance(config, ConfigDict):
    raise ValueError(f"get_config of {str(path)!r} returns a {type(config).__name__}: start from schema.default().")
  return config


def choose(preset: str, presets: Mapping[str, Callable[[ConfigDict], None]]) -> Callable[[ConfigDict], None]:
  """Returns the function that turns the default into `preset`; an unknown name is a ValueError that lists the known."""
  if preset not in presets:
    known = ", ".join(repr(name) for name in presets if name)
    raise ValueError(f"Unknown preset {preset!r}. Use one of {known}, as in --config=configs/<recipe>.py:<preset>.")
  return presets[preset]
