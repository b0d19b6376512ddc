"""Models: spec, families, layers, weights, checkpoints."""
