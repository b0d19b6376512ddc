"""Triton kernels, each beside its reference in plain torch."""
