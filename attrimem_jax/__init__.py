"""Memory policies trained by token-level attribution, in JAX."""

__version__ = "0.1.0"
