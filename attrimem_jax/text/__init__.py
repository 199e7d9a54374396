"""Text at the edge of the system: tokenizers, chat prompts assembled as ids, and byte spans of tokens. No model code."""
