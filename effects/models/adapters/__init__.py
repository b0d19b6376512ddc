"""Adapters (LoRA)."""
