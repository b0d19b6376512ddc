"""The specification of plans that save states of recurrent layers, or copy them.

A state is not addressed by position, so nothing repairs one that was taken at the wrong
position, read while it was overwritten, or kept without its blocks: each of these would
change tokens.
"""

from collections.abc import Iterable, Mapping

from minfer.blocks.keys import Key, group_keys
from minfer.blocks.prefix import Pages, every_node
from minfer.planning.states import most_state_pages
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Moved, SavesSkipped
from minfer.records.plan import Copy, Plan
from minfer.records.request import Request
from minfer.records.sequence import NEVER, Running
from minfer.records.state import EngineState, Transition
from minfer.testing.accounts import Seat, state_key
from minfer.testing.books import Books
from minfer.testing.invariants import free_pages
from minfer.testing.kept_states import kept_states, max_saves
from minfer.testing.law import require

# --- of plans ---------------------------------------------------------------------------


def check_plan_states(
    books: Books, plan: Plan, seats: Mapping[int, Seat], after: EngineState
) -> list[Copy]:
    """Raise InvariantError unless rows start from the states of their positions, and
    save theirs where they should. Returns the copies of states.
    """
    config = books.config
    if config.state_group is None:
        return []
    opened = {new_row.index for new_row in plan.opens}
    copies = list[Copy]()
    for index, seat in seats.items():
        if index in opened and plan.starts[index]:
            copies += _check_start(books, plan, seat, plan.starts[index], after)
        _check_saved(books, plan, seats, index, after)
    for save in plan.saves:
        seats[save.index].last_state = plan.saved_at(save)
    return copies


def is_save_point(config: EngineConfig, seat: Seat, end: int) -> bool:
    """Whether a prefill chunk may end at `end` to save a state there: at a block boundary
    before the last token of the prompt, from which an equal prompt can start.
    """
    if config.state_group is None or seat.account.request.recomputes_prompt:
        return False
    return end % config.block_size == 0 and end < seat.num_known_at_admission


def _check_start(
    books: Books, plan: Plan, seat: Seat, start: int, after: EngineState
) -> list[Copy]:
    """Check that a row which is opened at `start` copies the state that was kept for that
    position, or has taken over its pages. Returns the copies.
    """
    config, working = books.config, seat.tables[-1]
    key = state_key(config, seat, start)
    sources = {*books.states.get(key, ())} | ({working} if seat.took_state else set())
    if key in after.blocks.prefix.nodes:
        sources.add(after.blocks.prefix.nodes[key][0])
    copies = [copy for copy in plan.copies if copy.target in working]
    source_of = {copy.target: copy.source for copy in copies}
    from_pages = tuple(source_of.get(page, page) for page in working)
    whole = all(copy.count == config.block_size for copy in copies)
    right = from_pages in sources and whole and len(copies) in (0, len(working))
    require(right, "states", f"{seat.account.id} starts at {start} from {copies}")
    return copies


def _check_saved(
    books: Books,
    plan: Plan,
    seats: Mapping[int, Seat],
    index: int,
    after: EngineState,
) -> None:
    """Check that a row saves its state only at a known position. If there is room, a row
    must save it after each stride of its answer, and at the positions in its prompt from
    which others will start: short chunks must end there, and a chunk has one of them at
    most. If the plan already saves as many states as it may, the row is noted as skipped
    instead.
    """
    config, size, seat = books.config, books.config.block_size, seats[index]
    start = plan.starts[index]
    end = start + plan.num_scheduled_tokens[index]
    saves = {plan.saved_at(save) for save in plan.saves if save.index == index}
    anew = seat.account.request.recomputes_prompt
    require(not (saves and anew), "states", "of blocks that are not published")
    drafting = _has_drafts(books, plan, seat, index)
    require(not (saves and drafting), "states", "at a position that is not known")
    few = most_state_pages(config) < config.state_pages
    if anew or few or drafting:
        return
    awaited = {p for p in _awaited_positions(size, seat) if start < p <= end}
    is_long = 0 < config.states.inside_from <= end - start
    right = len(awaited) <= 1 if is_long else awaited <= {end}
    require(right, "states", f"a chunk from {start} to {end}, over {awaited}")
    due, saves_inside = awaited, bool(saves - {end})
    # No checkpoint is kept at the end of a chunk that keeps a state inside.
    if not awaited and not saves_inside:
        due = {end} & {next_checkpoint(config, seat, start)}
    require(not (due and saves - due), "states", f"saved at {saves}, not at {due}")
    if not due or saves or not _has_room(config, after):
        return
    full = len(plan.saves) >= max_saves(config)
    require(full, "states", f"{seat.account.id} does not save its state at {due}")
    _check_less_urgent(plan, seats, index, min(due), awaited=bool(awaited))
    books.skipped_saves[plan.step] += 1


def _has_drafts(books: Books, plan: Plan, seat: Seat, index: int) -> bool:
    """Whether a row has drafts in a plan or in those in flight."""
    return index in {draft.index for draft in plan.drafts} or any(
        flight.plan.run_ids[draft.index] == seat.run_id
        for flight in books.flights
        for draft in flight.plan.drafts
    )


def _awaited_positions(size: int, seat: Seat) -> set[int]:
    """The positions in a row's prompt from which others will start: samples of the same
    request, or another engine, to which its blocks are pushed.
    """
    request, positions = seat.account.request, set[int]()
    if request.n > 1:
        positions.add((seat.num_known_at_admission - 1) // size * size)
    if _is_pushed(request):
        positions.add((len(request.prompt) - 1) // size * size)
    return positions


def _is_pushed(request: Request) -> bool:
    return request.kv_transfer is not None and bool(request.kv_transfer.push_to)


def _is_awaited(seat: Seat) -> bool:
    """Whether others will start from states of a row's prompt."""
    request = seat.account.request
    return request.n > 1 or _is_pushed(request)


def _check_less_urgent(
    plan: Plan, seats: Mapping[int, Seat], skipped: int, due: int, *, awaited: bool
) -> None:
    """Check that a plan saves no state that is less urgent than that of the row
    `skipped` at `due`: states in prompts that others wait for (`awaited`) come first,
    then others in prompts; after prompts, those of the rows whose last state is the
    oldest.
    """
    seat = seats[skipped]
    in_prompt = due < seat.num_known_at_admission
    behind = due - seat.last_state
    for save in plan.saves:
        other, end = seats[save.index], plan.saved_at(save)
        if end < other.num_known_at_admission:
            fair = not awaited or _is_awaited(other)
        else:
            fair = not in_prompt and end - other.last_state >= behind
        detail = f"{seat.account.id} is skipped, and {other.account.id} is not"
        require(fair, "states", detail)


def next_checkpoint(config: EngineConfig, seat: Seat, start: int) -> int:
    """The position at which a row that starts a step at `start`, after its prompt, saves
    its state next, or NEVER.
    """
    size = config.block_size
    stride = config.states.decode_stride_blocks * size
    few = most_state_pages(config) < config.state_pages
    anew = seat.account.request.recomputes_prompt
    if config.state_group is None or not stride or few or anew:
        return NEVER
    last = (seat.num_known_at_admission - 1) // size * size
    return last + max(1, (start - last) // stride + 1) * stride


def _has_room(config: EngineConfig, after: EngineState) -> bool:
    """Whether there is room for many more states, whatever this turn has taken."""
    running = len(after.running) + 1
    saving = sum(len(plan.saves) for plan in after.inflight) + running
    kept = after.blocks.prefix.state_pages + config.state_pages * (saving + 1)
    reserve = running * config.block_pages + config.state_pages * (saving + 1)
    return after.blocks.available >= reserve and kept <= most_state_pages(config)


# --- of turns ---------------------------------------------------------------------------


def check_kept(
    books: Books, before: EngineState, events: Iterable[Event], after: EngineState
) -> None:
    """Raise InvariantError unless saved states are kept as soon as their step is over,
    and no more of them than allowed.
    """
    config = books.config
    if config.state_group is None:
        return
    now = after.blocks.prefix.nodes
    free = {*free_pages(after.blocks.pool)} if books.saved else {*()}
    run = after.running
    places = {run_id: i for i, run_id in enumerate(run.run_ids)}
    for saved in books.saved:
        position, i = len(saved.tokens), places.get(saved.seat.run_id)
        # If another sequence published an equal block (a twin) first, the row's own
        # blocks from there on are not published; the twin may be gone by now.
        has_block = (
            i is not None
            and min(run.chains[i].sealed) * config.block_size >= position
            and not _had_twin(config, before, run, i, position)
        )
        # Or it was kept and evicted in the same turn: then its pages are in use again.
        is_kept = saved.key in now or not free.issuperset(saved.pages)
        detail = f"that of {saved.seat.account.id} at {position} is not kept"
        require(not has_block or is_kept, "states", detail)
    if any(isinstance(event, Moved) for event in events):
        return  # loads are not bounded
    limit = max(most_state_pages(config), _pages(config, before))
    require(_pages(config, after) <= limit, "states", f"more than {limit} pages of them")


def _had_twin(
    config: EngineConfig, before: EngineState, run: Running, i: int, position: int
) -> bool:
    """Whether a block before `position` of the sequence at `i`, in the group without a
    window, was cached before this turn as another one.
    """
    g = config.full_group
    if g is None:
        return False
    size, nodes = config.groups[g].pages, before.blocks.prefix.nodes
    own = run.tables[i][g]
    keys = group_keys(run.chains[i].keys[: position // config.block_size], g)
    return any(
        key in nodes and nodes[key][0] != own[block * size : (block + 1) * size]
        for block, key in enumerate(keys)
    )


def check_skipped(books: Books, turn: Transition) -> None:
    """Raise InvariantError unless skipped saves are reported, and only where a step saves
    as many states as it may.
    """
    reasons = [r for r in turn.reasons if isinstance(r, SavesSkipped)]
    saves = {plan.step: len(plan.saves) for plan in turn.state.inflight}
    for reason in reasons:
        right = reason.saved == saves.get(reason.step) == max_saves(books.config)
        require(right and reason.skipped > 0, "reason", f"{reason} of {saves}")
    reported = {reason.step: reason.skipped for reason in reasons}
    for step, skipped in books.skipped_saves.items():
        told = reported.get(step, 0)
        require(told >= skipped, "reason", f"{told} of {skipped} skipped saves")


def _pages(config: EngineConfig, state: EngineState) -> int:
    """The pages of kept states, and of those that are being saved."""
    saves = sum(len(plan.saves) for plan in state.inflight)
    return state.blocks.prefix.state_pages + config.state_pages * saves


def may_be_dropped(before: EngineState, after: EngineState) -> set[Key]:
    """The kept states that a turn may drop, however recently they were used: those of
    running sequences, and one that became the working state of a newcomer.
    """
    dropped = set[Key]()
    for chain in (*before.running.chains, *after.running.chains):
        dropped.update(chain.states.kept, (chain.states.checkpoint,))
    working = {tuple(tables[-1]) for tables in after.running.tables}
    nodes = every_node(before.blocks.prefix)
    dropped.update(key for key, node in nodes.items() if node.pages in working)
    return dropped


def states_of(config: EngineConfig, state: EngineState) -> dict[Key, set[Pages]]:
    """The pages of each kept state, and of those that are being loaded."""
    if config.state_group is None:
        return {}
    kept = kept_states(config, state.blocks.prefix)
    pages_of = {key: {node.pages} for key, node in kept.items()}
    for transfer in state.tiers.transfers:
        for path in transfer.paths if transfer.kind.to_device else ():
            for key, pages in zip(path.keys, path.pages, strict=True):
                pages_of.setdefault(key, set()).add(pages)
    return pages_of
