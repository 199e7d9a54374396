"""What a policy writes and an answer model reads: grammar, bank, prompts, retrieval, context. No files, no rewards."""
