"""Figures that a run reports: scores over questions and how sure they are. Nothing here reads files or runs a model."""
