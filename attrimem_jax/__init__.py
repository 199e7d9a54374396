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
  from attrimem_jax.view.report import write_report

__version__ = "0.1.0"
__all__ = ["Agent", "Explanation", "Memory", "Reply", "load", "write_report"]


def __getattr__(name: str) -> Any:
  """Imports what is asked for on first use: `import attrimem_jax` alone loads neither JAX nor a model."""
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  home = "attrimem_jax.view.report" if name == "write_report" else "attrimem_jax.agent"
  return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
