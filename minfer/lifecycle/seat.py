"""The columns of a sequence that joins the running ones.

Two of them find the sequences with something to do by one comparison per column:
`grow_at`, the position at which the table should grow, and `publish_at`, the number of
tokens at which a block can be published or the sequence has its last token.
"""

from minfer.records.config import EngineConfig
from minfer.records.sequence import Chain, Running, Sequence, Tables


def table_blocks(config: EngineConfig, tables: Tables) -> int:
    """How many blocks the shortest of a sequence's tables has; that of the state group
    does not count.
    """
    pairs = zip(tables, config.block_groups, strict=False)
    return min([len(table) // group.pages for table, group in pairs])


def growth_lead(config: EngineConfig) -> int:
    """How many tokens before the end of its blocks a table should grow: a quarter block,
    so that growth can be spread over steps when many tables end at once.
    """
    return config.block_size // 4


def growth_mark(config: EngineConfig, blocks: int, last: int) -> int:
    """The position from which tables of `blocks` blocks should grow, at most the last
    position.
    """
    return min(last, blocks * config.block_size - growth_lead(config))


def publish_mark(config: EngineConfig, blocks: int, last: int) -> int:
    """How many tokens must be known to fill more than `blocks` blocks, or to have the
    last one.
    """
    return min(last, (blocks + 1) * config.block_size) + 1


def new_columns(
    config: EngineConfig,
    seq: Sequence,
    *,
    run_id: int,
    row: int,
    tables: Tables,
    chain: Chain,
    start: int,
) -> Running:
    """A new generation of `seq` as columns of one entry; the KV below `start` is cached
    or copied.
    """
    request = seq.request
    base = len(seq.history)
    last = request.most_known(config.max_model_len) - 1
    num_blocks = base // config.block_size
    return Running(
        seqs=(seq,),
        ids=(seq.id,),
        run_ids=(run_id,),
        rows=(row,),
        starts=(start,),
        num_known_at_admission=(base,),
        known=(base,),
        scheduled=(start,),
        last_index=(last,),
        publish_at=(publish_mark(config, num_blocks, last),),
        grow_at=(growth_mark(config, table_blocks(config, tables), last),),
        tables=(tables,),
        chains=(chain,),
        tails=(seq.history[num_blocks * config.block_size :],),
        fresh=((),),
    )
