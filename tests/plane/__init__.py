"""The whole control plane on one thread and a virtual clock, with faults."""
