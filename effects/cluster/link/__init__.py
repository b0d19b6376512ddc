"""What a front and an engine send each other, and which requests kill engines."""
