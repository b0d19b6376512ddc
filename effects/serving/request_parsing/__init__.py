"""Bodies of requests: their fields, limits and constraints, and an answer's parts."""
