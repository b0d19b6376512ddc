"""How events reach a client. Transports do not interpret events."""
