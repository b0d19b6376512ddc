"""Journals of running engines, as files."""
