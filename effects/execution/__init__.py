"""Executors, and what they are made of."""
