"""Memory policies trained by token-level attribution, in JAX.

agent = attrimem_jax.load()
memory = agent.write([("2024-03-04", [("Ann", "I moved to Lisbon."), ("Bot", "Nice!")])])
reply = memory.ask("Where does Ann live?")
reply.attribute()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from attrimem_jax.agent import Agent, Explanation, Memory, Reply, load
  from attrimem_jax.explain import Explained, attribute
  from attrimem_jax.view.report import write_report

__version__ = "0.1.0"
_HOMES = {
  "agent": ("Agent", "Explanation", "Memory", "Reply", "load"),
  "explain": ("Explained", "attribute"),
  "view.report": ("write_report",),
}
__all__ = ["Agent", "Explained", "Explanation", "Memory", "Reply", "attribute", "load", "write_report"]


def __getattr__(name: str) -> Any:
  """Imports what is asked for on first use: `import attrimem_jax` alone loads neither JAX nor a model."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  home = next(home for home, names in _HOMES.items() if name in names)
  return getattr(importlib.import_module(f"attrimem_jax.{home}"), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
