"""Where a model's weights and its cache lie: on ranks, in pages, in bytes."""
