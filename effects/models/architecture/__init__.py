"""What a model is and computes: its spec, read from config.json, and its layers."""
