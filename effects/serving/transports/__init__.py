"""How events reach a client. Transports know nothing of what events say."""
