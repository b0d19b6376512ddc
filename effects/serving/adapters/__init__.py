"""Adapters over HTTP: which names clients may use, and loading by request."""
