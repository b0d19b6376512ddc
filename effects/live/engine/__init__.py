"""The engine in this process: the driver loop, its thread, and what it reports."""
