"""Which tokens of memory an answer leaned on, and how far that can be believed; nothing here samples, retrieves or trains."""
