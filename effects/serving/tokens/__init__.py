"""Text to token ids and back: endpoints of vLLM's servers."""
