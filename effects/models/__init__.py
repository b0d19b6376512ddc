"""What a model is: spec, families, layers, weights, checkpoints."""
