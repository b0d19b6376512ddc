"""The specification of the blocks that an admission takes: computed block by block, in
the plainest way.
"""

from minfer.blocks.prefix import Node, node_of
from minfer.blocks.window import outside
from minfer.records.config import EngineConfig
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState


def needs(config: EngineConfig, after: EngineState, seq: Sequence) -> int:
    """Blocks that the admission of `seq` takes, of those that are available."""
    size, known = config.block_size, len(seq.history)
    full = (known - 1) // size if _may_read(seq) else 0
    cached = [node_of(after.blocks.prefix, key) for key in seq.keys[:full]]
    hit = _hit(config, cached, full)
    low = outside(hit * size, config.window, size)
    idle = sum(node is not None and not node.users for node in cached[low:hit])
    ends = min(len(seq.request.prompt) + seq.request.max_tokens, config.max_model_len)
    next_block = known % size == 0 and known + 1 < ends and seq.request.max_tokens > 0
    spare = max(config.watermark, next_block) if len(after.running) else 0
    return -(-known // size) - hit + idle + spare


def _may_read(seq: Sequence) -> bool:
    """Whether its cached blocks may be read: not by the first sample of a request with
    `reads_cache` false, before it has output.
    """
    request = seq.request
    wanted = request.reads_cache or seq.sample > 0
    return wanted or len(seq.history) > len(request.prompt)


def _hit(config: EngineConfig, cached: list[Node | None], full: int) -> int:
    """Leading blocks, of `full` ones, that need not be computed: all are cached or, with
    a window, those that the next tokens attend to.
    """
    if not config.window:
        return cached.index(None) if None in cached else full
    for hit in range(full, 0, -1):
        low = outside(hit * config.block_size, config.window, config.block_size)
        if None not in cached[low:hit]:
            return hit
    return 0
