"""Work that can wait is spread over turns: a bounded share of it each time, so that a
batch whose blocks all fill, or whose tables all end, in the same step does not stop the
engine.
"""

from minfer.config import EngineConfig


def spread(config: EngineConfig, tokens: int) -> int:
    """Blocks, of those that can wait, that a turn handles: four times what
    `tokens` fill.
    """
    return max(2, 4 * tokens // config.block_size)
