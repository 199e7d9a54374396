"""What to keep when the budget is full: value factors, learned weights, forgetting. No questions, no files."""
