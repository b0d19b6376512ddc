"""What an API server and an engine send each other, and which requests kill engines."""
