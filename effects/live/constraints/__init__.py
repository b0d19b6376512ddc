"""Constraints of outputs: compiling them, and masks of allowed tokens."""
