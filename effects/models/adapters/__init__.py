"""Adapters: PEFT checkpoints, and their places on a device."""
