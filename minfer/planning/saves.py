"""Copies of states of recurrent layers: kept ones to rows that start from them, and
working states to be kept; `states.py` decides where.

If a row starts after position 0, the plan that opens it copies a kept state to its
working state; until then the row holds the kept one. A save copies the working state to
other pages, which belong to the plan until its results come. Then the state is published,
unless its row has left, or the same state is kept already.
"""

from bisect import bisect_left
from itertools import compress
from operator import attrgetter, ge
from typing import Final

from minfer.blocks.ownership import Transaction
from minfer.blocks.prefix import ROOT, Pages, is_live, pages_of
from minfer.planning.states import (
    block_before_state,
    droppable,
    is_pressed,
    max_saves,
    most_state_pages,
    most_urgent_first,
    next_save,
    state_key,
)
from minfer.planning.step_builder import StepBuilder
from minfer.records.config import EngineConfig
from minfer.records.messages import SavesSkipped
from minfer.records.plan import Copy, Plan, SaveState
from minfer.records.sequence import Chain, RowStates, edited, positions
from minfer.records.state import EngineState
from minfer.values.record import evolve

_save_at: Final = attrgetter("states.save_at")

# --- starts -----------------------------------------------------------------------------


def copy_start_states(builder: StepBuilder) -> None:
    """Add the copies of kept states to the working states of rows that this plan opens,
    and release the kept ones.
    """
    config, state = builder.config, builder.state
    run = state.running
    change, chains = Transaction(state.blocks), dict[int, Chain]()
    copies = list[Copy]()
    for i in positions(run, builder.shares):
        chain, states = run.chains[i], run.chains[i].states
        if not states.origin:
            continue
        sources = pages_of(change.prefix, (states.origin,))
        working = run.tables[i][len(config.block_groups)]
        copies += [
            Copy(*pages, config.block_size)
            for pages in zip(sources, working, strict=True)
        ]
        change.prefix.release(states.origin)
        started = evolve(states, origin=ROOT, kept=(states.origin,))
        chains[i] = evolve(chain, states=started)
    if chains:
        running = edited(run, chains=chains)
        builder.state = evolve(state, blocks=change.done(), running=running)
        builder.copies = tuple(copies)


# --- saves ------------------------------------------------------------------------------


def add_saves(builder: StepBuilder, plan: Plan, out: list[int]) -> Plan:
    """Add the saves to `plan`, which has just been built, and is the last one in flight.
    `out` has the indices of the running sequences that are not in it. Returns the plan
    with its saves.

    A row whose save is due has no drafts in this plan, nor in one before it
    (`plan_drafts.py`): its position is known. A prefill chunk may end after it
    (`bound_chunk`).
    """
    config, state = builder.config, builder.state
    run, scheduled = state.running, state.running.scheduled
    due = [*compress(range(len(run)), map(ge, scheduled, map(_save_at, run.chains)))]
    if not due:
        return plan
    most, skipped = max_saves(config), 0
    if len(due) > most:
        due = most_urgent_first(run, due)
    taker, saves, chains = _PageTaker(config, state), list[SaveState](), {}
    for i in due:
        states = run.chains[i].states
        pages: Pages = ()
        if scheduled[i] == states.save_at or run.run_ids[i] in builder.shares:
            skipped += len(saves) == most
            pages = taker.take(states) if len(saves) < most else ()
        if pages:
            inside = states.save_at if states.save_at < scheduled[i] else 0
            saves.append(SaveState(i - bisect_left(out, i), pages, inside))
        save_at = next_save(
            config,
            run.seqs[i],
            states,
            scheduled[i],
            run.last_index[i],
            pressed=is_pressed(config, taker.change.pool),
        )
        last = states.save_at if pages else states.last
        states = evolve(states, last=last, save_at=save_at)
        chains[i] = run.chains[i].with_states(states)
    if skipped:
        builder.reasons.append(SavesSkipped(plan.step, most, skipped))
    plan = evolve(plan, saves=tuple(saves))
    builder.state = evolve(
        state,
        blocks=taker.change.done(),
        running=edited(run, chains=chains),
        inflight=(*state.inflight[:-1], plan),
    )
    return plan


class _PageTaker:
    """Takes pages for states to be saved. Never kept, never shared."""

    def __init__(self, config: EngineConfig, state: EngineState) -> None:
        self.config = config
        self.change = Transaction(state.blocks)
        self.reserve = len(state.running) * config.block_pages
        saves = [save for plan in state.inflight for save in plan.saves]
        self.saving = config.state_pages * len(saves)  # pages in flight

    def take(self, states: RowStates) -> Pages:
        """The pages for one more state of a row with `states`, or none if that would not
        leave a block for each row.
        """
        change, pages = self.change, self.config.state_pages
        if change.available < self.reserve + pages:
            return ()
        full = self._is_full()
        if full or is_pressed(self.config, change.pool):
            dropped = droppable(change.prefix, states)
            if dropped:
                change.pool.release(change.prefix.drop_state(dropped))
            elif full:
                return ()
        self.saving += pages
        allocated = change.take(pages)
        return allocated.pages if allocated else ()

    def _is_full(self) -> bool:
        """Whether one more state would exceed the share of kept states in the pool."""
        kept = self.change.prefix.state_pages + self.saving + self.config.state_pages
        return kept > most_state_pages(self.config)


def keep_states(config: EngineConfig, state: EngineState, plan: Plan) -> EngineState:
    """Publish the states that a committed plan saved; the blocks of their rows have been
    published before.
    """
    run, change = state.running, Transaction(state.blocks)
    saved = {plan.run_ids[save.index] for save in plan.saves}
    places = {run.run_ids[i]: i for i in positions(run, saved)}
    chains = dict[int, Chain]()
    for save in plan.saves:
        i = places.get(plan.run_ids[save.index])
        if i is None:
            change.pool.release(save.pages)
            continue
        position = plan.saved_at(save)
        is_checkpoint = position >= run.num_known_at_admission[i]
        chain = run.chains[i]
        kept = _publish(config, change, chain, position, save.pages, is_checkpoint)
        chains[i] = chain.with_states(kept)
    running = edited(run, chains=chains)
    return evolve(state, blocks=change.done(), running=running)


def _publish(
    config: EngineConfig,
    change: Transaction,
    chain: Chain,
    position: int,
    pages: Pages,
    is_checkpoint: bool,
) -> RowStates:
    """Publish the state of a row at `position`; a checkpoint replaces the checkpoint
    before it. Returns the row's states after that.
    """
    prefix, states = change.prefix, chain.states
    content = chain.keys[position // config.block_size - 1]
    key, parent = state_key(config, content), block_before_state(config, content)
    is_new = prefix.publish_state(parent, key, pages, store=not is_checkpoint)
    if not is_new:
        change.pool.release(pages)
    checkpoint = states.checkpoint
    if is_checkpoint:
        if checkpoint in prefix.nodes and not is_live(prefix, checkpoint):
            change.pool.release(prefix.drop_state(checkpoint))
        checkpoint = key if is_new else ROOT
    kept = [own for own in states.kept if own in prefix.nodes]
    kept += [key] if is_new else []
    return evolve(states, kept=tuple(kept), checkpoint=checkpoint)


def release_saves(state: EngineState) -> EngineState:
    """Free the pages of all saves in flight: their plans are discarded."""
    pages = [
        page for plan in state.inflight for save in plan.saves for page in save.pages
    ]
    if not pages:
        return state
    change = Transaction(state.blocks)
    change.pool.release(tuple(pages))
    return evolve(state, blocks=change.done())
