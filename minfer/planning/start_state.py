"""The state of recurrent layers from which an admitted sequence starts, and its working
state.
"""

from minfer.blocks.keys import Key
from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, Pages, is_live
from minfer.planning.prefix_hit import Hit
from minfer.planning.states import is_pressed, next_save
from minfer.records.config import EngineConfig
from minfer.records.sequence import RowStates, Running
from minfer.values.log import Log
from minfer.values.record import evolve


def take_working_state(
    config: EngineConfig, change: Transaction, hit: Hit, num_known: int
) -> tuple[Pages, Key]:
    """Take pages for the working state of a newcomer with `num_known` tokens, and hold
    the kept state from which it starts. Returns the pages, and the key of that state,
    which is ROOT for a newcomer that starts at position 0.

    If there are too few pages for both states, the pages of the kept state become those
    of the working state: nothing is copied then, and the key is ROOT.
    """
    pages, origin = config.state_pages, hit.state
    if origin and not is_live(change.prefix, origin):
        tables = _least_new_pages(config, hit.blocks, num_known)
        if change.available < tables + 2 * pages:
            return change.prefix.drop_state(origin), ROOT
    if origin:
        change.prefix.hold(origin)
    allocated = change.take(pages)
    return (allocated.pages if allocated else ()), origin  # never None: they were counted


def _least_new_pages(config: EngineConfig, hit: int, num_known: int) -> int:
    """The fewest pages of blocks that a newcomer takes in addition to a hit of `hit`
    blocks; in groups with a window, those of one block.
    """
    new = -(-num_known // config.block_size) - hit
    windows = sum(group.pages for group in config.block_groups if group.window)
    return new * (config.block_pages - windows) + windows


def with_states(
    config: EngineConfig,
    change: Transaction,
    seat: Running,
    hit: Hit,
    working: Pages,
    origin: Key,
) -> Running:
    """The columns of a newcomer, `seat`, with its working state and the kept state from
    which it starts: `working` and `origin`, as `take_working_state` returned them.
    """
    (start,), (last,), (seq,) = seat.starts, seat.last_index, seat.seqs
    states = RowStates(origin, hit.found.shared, start)
    pressed = is_pressed(config, change.pool)
    save_at = next_save(config, seq, states, start, last, pressed=pressed)
    states = evolve(states, save_at=save_at)
    return evolve(
        seat,
        tables=((*seat.tables[0], Log(working)),),
        chains=(evolve(seat.chains[0], states=states),),
    )
