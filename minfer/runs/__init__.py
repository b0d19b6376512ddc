"""Uses of the engine's states as values: journals, replay, forks, explanations,
simulation, the oracle.
"""
