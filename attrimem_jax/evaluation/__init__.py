"""Answering held-out questions from written memory, and how sure the scores are; no training and no files here."""
