"""Sampling from a decoder, and writing the memory of a history with it. No rewards and no gradients here."""
