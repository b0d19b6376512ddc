"""OpenAI's API: one module for each endpoint, and what endpoints share."""
