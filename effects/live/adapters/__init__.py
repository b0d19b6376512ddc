"""Adapters (LoRA) of a served model: their names, where they come from, how they load."""
