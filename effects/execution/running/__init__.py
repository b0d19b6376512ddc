"""A step on the device: the forward pass, speculation (speculative_step.py), sampling."""
