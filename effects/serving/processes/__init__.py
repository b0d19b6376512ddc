"""A server's start and end, and what its API servers do. What watches and restarts API
servers and engines is in `minfer.effects.cluster.processes`.
"""
