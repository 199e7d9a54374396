"""The one decoder that serves policy, reference, answer model and embedder. No text, no files, no rewards here."""
