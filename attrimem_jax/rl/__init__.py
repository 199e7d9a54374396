"""Learning: advantages, losses and the compiled updates. Numbers in, parameters out; no text, no files, no sampling."""
