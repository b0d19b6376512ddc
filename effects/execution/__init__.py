"""Executors and their parts."""
