"""Scheduling policies: those that come with minfer, and checked calls of any."""
