"""Reward: what an answer is worth, as pure functions of texts. No models, no files, no credit for single tokens."""
