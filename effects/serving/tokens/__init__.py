"""Text to token ids and back, as vLLM's servers do it."""
