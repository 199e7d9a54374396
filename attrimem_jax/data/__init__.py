"""Where histories and questions come from: the synthetic world and benchmark readers. No tokens, no models."""
