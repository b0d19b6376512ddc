"""Beam search, as rounds of ordinary requests."""
