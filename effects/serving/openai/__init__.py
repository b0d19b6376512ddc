"""OpenAI's API: an endpoint is a module; fields, errors, usage and scores are shared."""
