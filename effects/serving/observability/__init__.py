"""Logs, metrics, spans, records of requests, and the live view."""
