"""KV blocks that engines send each other."""
