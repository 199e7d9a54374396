"""What `main` can be asked to do: warm start, training, evaluation, export. Wiring and loops only."""
