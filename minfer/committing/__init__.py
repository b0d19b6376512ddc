"""Committing the results of a step, or discarding them."""
