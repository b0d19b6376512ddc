"""The specification of kept states of recurrent layers, in a state of the engine."""

from collections.abc import Mapping

from minfer.blocks.keys import Key, group_key, is_state
from minfer.blocks.prefix import ROOT, Node, PrefixIndex, every_node
from minfer.records.config import EngineConfig
from minfer.records.plan import Plan
from minfer.records.sequence import NEVER, Running
from minfer.records.state import EngineState
from minfer.testing.law import require


def kept_states(config: EngineConfig, prefix: PrefixIndex) -> dict[Key, Node]:
    """The kept states of an index."""
    group = config.state_group or 0
    nodes = every_node(prefix).items()
    return {key: node for key, node in nodes if is_state(key, group)}


def check_states(config: EngineConfig, state: EngineState) -> None:
    """Raise InvariantError unless each kept state is a child of its block, and counted,
    and running sequences will save theirs at a position that they have not reached.
    """
    prefix, host = state.blocks.prefix, state.tiers.host
    kept = kept_states(config, prefix)
    _check_kept(config, kept)
    counted = prefix.state_pages == config.state_pages * len(kept)
    right = prefix.state_group == (config.state_group or 0) and counted
    require(right, "states", f"{prefix.state_pages} pages of {len(kept)} states")
    if host is not None:
        _check_kept(config, kept_states(config, host.prefix))
    for plan in state.inflight:
        _check_saves(config, plan)
    for i in range(len(state.running)) if config.state_group else ():
        _check_row(config, state.running, i)


def _check_kept(config: EngineConfig, kept: Mapping[Key, Node]) -> None:
    for key, node in kept.items():
        size = len(node.pages) == config.state_pages
        require(size and not node.children, "states", f"{node} has blocks behind it")
        parent = block_before(config, key[1:])
        require(node.parent == parent, "states", "a state behind another block")


def max_saves(config: EngineConfig) -> int:
    """The states that a plan saves, at most."""
    pages = max(config.states.max_saved_pages, config.state_pages)
    return pages // config.state_pages if config.state_pages else 0


def block_before(config: EngineConfig, content: Key) -> Key:
    """The block, in the group without a window, whose child a kept state is; or ROOT."""
    for g, group in enumerate(config.block_groups):
        if not group.window:
            return group_key(content, g)
    return ROOT


def _check_saves(config: EngineConfig, plan: Plan) -> None:
    """Check that a plan saves states of its rows after whole blocks, each once, of no row
    with drafts, and no more of them than a step may; before a row's last input only those
    of long prefill chunks.
    """
    places = [save.index for save in plan.saves]
    require(len(places) == len({*places}), "states", "a state is saved twice")
    require(not plan.saves or config.state_group, "states", "there is no state group")
    require(len(places) <= max_saves(config), "states", f"{len(places)} are saved")
    drafting = {draft.index for draft in plan.drafts}
    filled = {fill.index for fill in plan.fills}
    for save in plan.saves:
        start, inputs = plan.starts[save.index], plan.num_scheduled_tokens[save.index]
        whole = plan.saved_at(save) % config.block_size == 0
        right = len(save.pages) == config.state_pages and whole
        require(right, "states", f"{save} from {start}, {inputs} inputs")
        is_long = 0 < config.states.inside_from <= inputs and save.index in filled
        within = not save.inside or start < save.inside < start + inputs
        require(within and (is_long or not save.inside), "states", f"{save} inside")
        require(save.index not in drafting, "states", f"{save} of a row with drafts")


def _check_row(config: EngineConfig, run: Running, i: int) -> None:
    """Check the working state of the sequence at `i`, and where it is saved next."""
    table, states, size = run.tables[i][-1], run.chains[i].states, config.block_size
    require(len(table) == config.state_pages, "states", f"a working state in {table}")
    save_at, scheduled = states.save_at, run.scheduled[i]
    whole = save_at % size == 0 and save_at <= run.last_index[i]
    later = save_at > scheduled and (whole or save_at == NEVER)
    require(later, "states", f"to be saved at {save_at}, and scheduled to {scheduled}")
    if states.origin:
        start = run.starts[i]
        unopened = scheduled == start > 0 and start % size == 0
        key = run.chains[i].keys[start // size - 1] if unopened else ROOT
        right = states.origin == group_key(key, len(config.block_groups))
        require(right, "states", f"a row that starts at {start} holds another state")
