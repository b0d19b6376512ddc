"""The engine's process, and its end of the links to all API servers."""
