"""Bounds the deferrable work of a turn, so that a batch whose blocks all fill, or whose
tables all end, in the same step does not stall the engine.
"""

from minfer.records.config import EngineConfig


def deferrable_blocks(config: EngineConfig, tokens: int) -> int:
    """The deferrable blocks that a turn handles: four times as many as `tokens` fill."""
    return max(2, 4 * tokens // config.block_size)
