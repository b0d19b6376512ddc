"""Uses of the engine's states as values: journals, replay, forks, explanations,
simulation, the oracle. And `wire`: the form of a plan between the ranks of an engine.
"""
