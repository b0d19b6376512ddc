"""The specification of the pages that an admission takes: computed block by block, in the
plainest way.
"""

from minfer.blocks.keys import Key, group_key
from minfer.blocks.prefix import node_of
from minfer.blocks.window import outside
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState


def pages_needed(config: EngineConfig, after: EngineState, seq: Sequence) -> int:
    """Pages that the admission of `seq` takes, of those that are available."""
    size, num_tokens = config.block_size, len(seq.history)
    full = (num_tokens - 1) // size if _may_read(seq) else 0
    hit = longest_hit(config, after, seq.keys, full)
    pages = pages_at_once(config, -(-num_tokens // size))
    for g, group in enumerate(config.block_groups):
        reads = read_blocks(config, group, hit)
        saved = len(reads)
        for block in reads:
            node = node_of(after.blocks.prefix, group_key(seq.keys[block], g))
            saved -= node is not None and not node.users
        pages -= saved * group.pages
    ends = min(len(seq.request.prompt) + seq.request.max_tokens, config.max_model_len)
    next_block = (
        num_tokens % size == 0 and num_tokens + 1 < ends and seq.request.max_tokens > 0
    )
    if not len(after.running):
        return pages
    return pages + max(
        config.watermark, next_block * sum(group.pages for group in config.block_groups)
    )


def pages_at_once(config: EngineConfig, blocks: int) -> int:
    """Pages that a sequence of this many blocks holds at once at least: where a group has
    a window, the most blocks that a query and those before it in the window lie in, and
    those of its sink tokens; and those of its working state.
    """
    total, size = config.state_pages, config.block_size
    for group in config.block_groups:
        max_blocks = blocks
        if group.window:
            positions = range(group.window - 1, group.window - 1 + size)
            spans = [
                position // size - (position - group.window + 1) // size + 1
                for position in positions
            ]
            first = [position // size for position in range(group.sink_tokens)]
            max_blocks = min(blocks, max(spans) + len({*first}))
        total += max_blocks * group.pages
    return total


def read_blocks(config: EngineConfig, group: CacheGroup, hit: int) -> list[int]:
    """The blocks of a hit of `hit` blocks that the next query reads in a group."""
    size = config.block_size
    low = outside(hit * size, group.window, size)
    return [
        block for block in range(hit) if block >= low or block * size < group.sink_tokens
    ]


def longest_hit(
    config: EngineConfig, after: EngineState, keys: tuple[Key, ...], full: int
) -> int:
    """The most blocks, of `full` ones, that need not be computed: in each group, all that
    the next query reads are cached, and the state after them is kept, if there is any.
    """
    nodes, states = after.blocks.prefix.nodes, config.state_group
    for hit in range(full, 0, -1):
        if states is not None and group_key(keys[hit - 1], states) not in nodes:
            continue
        if all(
            group_key(keys[block], g) in nodes
            for g, group in enumerate(config.block_groups)
            for block in read_blocks(config, group, hit)
        ):
            return hit
    return 0


def _may_read(seq: Sequence) -> bool:
    """Whether its cached blocks may be read: not by the first sample of a request with
    `reads_cache` false, before it has output.
    """
    request = seq.request
    may_share = request.reads_cache or seq.sample > 0
    return may_share or len(seq.history) > len(request.prompt)
