"""KV events: an engine publishes which blocks its prefix cache has, as vLLM does."""
