"""The shape of the package: imports point downwards, no wall clock and no global random numbers in the library."""

import ast
import importlib
import pathlib
import pkgutil

import pytest

import attrimem_jax

PACKAGE = pathlib.Path(attrimem_jax.__file__).parent
# A part may import parts of its own rank or below; the parts of one rank may not import each other in a circle.
RANKS = {
  "types": 0,
  "checks": 0,
  "nn": 1,
  "text": 1,
  "memory": 1,
  "data": 1,
  "rollout": 2,
  "attribution": 2,
  "reward": 2,
  "retention": 2,
  "systems": 3,
  "serving": 3,
  "rl": 3,
  "io": 3,  # files are for the edge: what computes is handed models and never loads one
  "evaluation": 3,
  "view": 3,
  "config": 3,
  "arms": 3,
  "validation": 3,
  "jobs": 4,
  "agent": 4,
  "explain": 4,
}
CLOCKS = {"now", "today", "utcnow", "time", "time_ns", "monotonic", "perf_counter", "localtime", "gmtime", "strftime"}
MAY_READ_CLOCK = ("io", "main")
GLOBAL_RANDOM_IS_FINE = {"default_rng", "Generator", "SeedSequence", "PCG64", "Philox", "BitGenerator"}


def _files():
  return sorted(path for path in PACKAGE.rglob("*.py"))


def _part(path):
  """The package or module right below attrimem_jax that a file belongs to; "" for attrimem_jax/__init__.py itself."""
  first = path.relative_to(PACKAGE).parts[0]
  return "" if first == "__init__.py" else first.removesuffix(".py")


def _imported(path):
  """Parts of attrimem_jax that a file imports at run time; `if TYPE_CHECKING:` is for the type checker alone."""
  tree = ast.parse(path.read_text(encoding="utf-8"))
  typing_only = {
    id(node)
    for block in ast.walk(tree)
    if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
    for node in ast.walk(block)
  }
  names = []
  for node in ast.walk(tree):
    if id(node) in typing_only:
      continue
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative imports hide which way an import points"
      names += [f"{node.module}.{alias.name}" for alias in node.names]
  return {name.split(".")[1] for name in names if name.startswith("attrimem_jax.")}


GRAPH = {}
for file in _files():
  GRAPH.setdefault(_part(file), set()).update(_imported(file) - {_part(file)})


@pytest.mark.parametrize("part", sorted(part for part in GRAPH if part not in ("", "main")))
def test_imports_point_downwards(part):
  assert part in RANKS, f"attrimem_jax.{part} is new: give it a rank"
  above = {other for other in GRAPH[part] if RANKS.get(other, 99) > RANKS[part]}
  assert not above, f"attrimem_jax.{part} imports {above}, which stand above it"


def test_imports_make_no_circle():
  done, path = set(), []

  def visit(part):
    assert part not in path, f"imports in a circle: {' -> '.join([*path, part])}"
    if part in done:
      return
    path.append(part)
    for other in sorted(GRAPH.get(part, ())):
      visit(other)
    done.add(path.pop())

  for part in sorted(GRAPH):
    if part:  # the package's own front door may open every part
      visit(part)


def _called(tree):
  """(object, attribute) of every attribute access such as `time.time` or `np.random.seed`, with its line."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      yield ast.unparse(node.value), node.attr, node.lineno


@pytest.mark.parametrize("file", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_wall_clock_and_no_global_random_numbers(file):
  """Dates come from the data, and every draw from a key folded from the seed: else no run could be repeated."""
  tree = ast.parse(file.read_text(encoding="utf-8"))
  for owner, name, line in _called(tree):
    where = f"{file.relative_to(PACKAGE)}:{line}: {owner}.{name}"
    reads_clock = name in CLOCKS and owner.split(".")[-1] in ("time", "datetime", "date")
    assert not reads_clock or _part(file) in MAY_READ_CLOCK, f"{where} reads a clock"
    assert owner not in ("np.random", "numpy.random") or name in GLOBAL_RANDOM_IS_FINE, f"{where} is a global generator"
    assert owner != "random", f"{where} is a global generator"
  for node in ast.walk(tree):
    assert not (isinstance(node, ast.ImportFrom) and node.module in ("time", "random")), f"{file}: import the module"


@pytest.mark.parametrize("file", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_text_files_name_their_encoding(file):
  """Without it, Python takes that of the machine: under LC_ALL=C nothing but ASCII could be written."""
  for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Call):
      name = ast.unparse(node.func)
      named = any(keyword.arg == "encoding" for keyword in node.keywords)
      missing = name.endswith((".read_text", ".write_text")) and not named
      assert not missing, f"{file.relative_to(PACKAGE)}:{node.lineno}: {name} names no encoding"


def test_every_module_imports():
  for module in pkgutil.walk_packages([str(PACKAGE)], "attrimem_jax."):
    importlib.import_module(module.name)
