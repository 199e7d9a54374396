"""Which tokens of memory an answer leaned on, and how far to believe it; nothing here samples, retrieves or trains."""
