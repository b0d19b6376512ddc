"""Parameters of sampling, and its definition on plain values."""
