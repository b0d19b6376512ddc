"""A step on the device: the forward pass, drafts, sampling."""
