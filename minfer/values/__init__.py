"""Plain values that know nothing of an engine: persistent maps and logs, checks."""
