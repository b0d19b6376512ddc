"""What each mechanism is worth: `python -m bench.ablation`."""
