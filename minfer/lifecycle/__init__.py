"""The transitions of a sample's life: arrival, seats, publication, preemption, end."""
