"""A server's start and end, and what its fronts do. What watches and restarts fronts and
engines is in `minfer.effects.cluster.processes`.
"""
