"""Tokenizers, chat prompts put together as ids, and the bytes that tokens cover. No networks, no memory."""
