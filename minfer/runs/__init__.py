"""What follows from the engine being a value: journals, replay, forks, explanations, the
oracle.
"""
