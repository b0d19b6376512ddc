"""How a model is laid out in memory and over ranks, from its spec.

shapes.py         bytes of weights, activations and the cache; padding of steps
cache_layout.py   groups of layers, and the cache's pages that they share
rank_parts.py     the part of each tensor of a checkpoint that a rank reads
"""
