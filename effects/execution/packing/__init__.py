"""A plan as words for the device, and the device's results as a plan's results."""
