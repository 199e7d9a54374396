"""An OpenAI-compatible endpoint over models: requests, the worker that batches them, HTTP. No training, no memory."""
