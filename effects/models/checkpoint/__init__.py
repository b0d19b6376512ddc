"""A checkpoint's files: what they hold, and how their tensors become weights."""
