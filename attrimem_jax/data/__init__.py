"""Where histories and questions come from: the synthetic world and benchmark readers; no tokens, models or training here."""
