"""The specification of the waiting queue: which samples are admitted or preempted, and
which must not be left waiting.

After the last plan of a turn the head of the queue is looked at once more: the blocks it
needs and those available are computed here in the plainest way (block by block, from the
index), and if it could be admitted it must not be in the queue. For deferred clients the
policy is called again.
"""

from collections.abc import Collection
from itertools import chain
from typing import Final

from minfer.blocks.keys import Key
from minfer.blocks.pool import Pool
from minfer.blocks.prefix import Node, PrefixIndex, every_node
from minfer.blocks.window import outside
from minfer.lifecycle.committed import committed
from minfer.planning.admit import current_load
from minfer.records.config import EngineConfig
from minfer.records.messages import Execute, PolicyOverride, QueueBlocked, WakeAt
from minfer.records.sequence import SampleId, Sequence
from minfer.records.state import EngineState, Transition
from minfer.testing.adapter_laws import unready_samples, without_adapter
from minfer.testing.books import Books
from minfer.testing.draft_laws import may_wait_to_draft
from minfer.testing.invariants import InvariantError, may_defer, require
from minfer.testing.needs import pages_needed
from minfer.testing.plan_laws import Planning, held_for_copies
from minfer.testing.skipped_rows import is_paused, skips_step, suspects
from minfer.values.record import evolve

_CAUSES: Final = (
    "blocks",
    "rows",
    "budget",
    "sibling",
    "policy",
    "share",
    "loading",
    "adapter",
)


def check_queue(
    books: Books, before: EngineState, turn: Transition, planning: Planning
) -> None:
    """Raise InvariantError unless as many sequences as possible were admitted, in
    order.
    """
    config, after = books.config, turn.state
    _check_order_is_kept(before, after)
    _check_shortage(before, after, planning)
    _check_order(config, before, after, planning)
    _check_waits(config, turn)
    # Whether one more step could be planned.
    room = len(after.inflight) < config.depth and not may_wait_to_draft(books)
    runs_alone = bool(suspects(config, books.running))
    if room and not runs_alone:
        _check_left_out(books, after, planning)
    _check_starved(config, after, planning)
    if (room or planning.plans) and after.waiting and not runs_alone:
        _check_head(books, turn, planning, tried=room)
    _check_reasons(before, turn)


def _check_waits(config: EngineConfig, turn: Transition) -> None:
    """Check that while there are requests something is in flight, or the engine waits for
    a time or for the host. The time is the policy's answer: the policy is called again.
    """
    after = turn.state
    waits = [command for command in turn.commands if isinstance(command, WakeAt)]
    for wake in waits:
        require(wake.time > after.time, "wake", "a wait that is over")
    planned = any(isinstance(command, Execute) for command in turn.commands)
    overridden = any(isinstance(reason, PolicyOverride) for reason in turn.reasons)
    if waits and not (planned or overridden):  # it was called in this state
        expected = config.policy.admit_from(after.policy, current_load(config, after))
        is_expected = waits[-1].time == expected
        require(is_expected, "wake", f"at {waits[-1].time}; the policy said {expected}")
    # Paused samples keep their blocks and rows, for which others may have to wait.
    busy = waits or after.inflight or not after.requests or after.paused
    if after.tiers.transfers or any(slot.loading for slot in after.adapters.slots):
        return
    require(busy, "work conservation", "requests, but nothing in flight")


def _is_loading(state: EngineState) -> bool:
    """Whether pages are written by a load, which are available after it."""
    return any(transfer.kind.to_device for transfer in state.tiers.transfers)


def _saved_pages(state: EngineState) -> int:
    """Pages of states that are being saved, which are available after that."""
    return sum(len(save.pages) for plan in state.inflight for save in plan.saves)


def _check_left_out(books: Books, after: EngineState, planning: Planning) -> None:
    """Check that no running sample could be in one more step."""
    for account in books.running:
        reason = skips_step(books.config, account, after)
        detail = f"{account.id} could run, and one more step can be planned"
        require(reason, "left out", detail)
        if reason == "blocks":
            planning.starved.append(account.id)


def _check_order_is_kept(before: EngineState, after: EngineState) -> None:
    """Check that preemption and restart never make a sample's rank worse."""
    places = {seq.place[1:]: seq.place for seq in (*before.waiting, *before.running.seqs)}
    for seq in (*after.waiting, *after.running.seqs):
        keeps_rank = seq.place <= places.get(seq.place[1:], seq.place)
        require(keeps_rank, "order", f"{seq.id} lost its rank")


def _check_shortage(before: EngineState, after: EngineState, planning: Planning) -> None:
    """Check that no sample is preempted while blocks behind a fence are about to be
    freed.
    """
    coming = any(fence in before.fences for fence in after.fences)
    load_numbers = {
        transfer.number for transfer in before.tiers.transfers if transfer.kind.to_device
    }
    coming = coming or any(
        transfer.number in load_numbers for transfer in after.tiers.transfers
    )
    coming = coming or any(
        plan.saves and plan in after.inflight for plan in before.inflight
    )
    is_valid = not (planning.preempted and coming)
    require(is_valid, "preemption", "though blocks were coming")


def _check_order(
    config: EngineConfig, before: EngineState, after: EngineState, planning: Planning
) -> None:
    """Check that admitted samples rank before all that still wait, except preempted ones,
    those of deferred clients, and those whose adapter is not ready.

    The first in rank is never preempted. But a preempted sample may get a better rank for
    its work (`Policy.requeue_rank`), be admitted again at once, and be the first from
    then on.
    """
    victims = {victim for victim, _ in planning.preempted}
    admitted = set(planning.admitted) - victims
    loading = after.tiers.loading
    queue = [
        seq
        for seq in after.waiting
        if seq.id not in victims and seq.request.id not in loading
    ]
    admitted_seqs = [seq for seq in after.running.seqs if seq.id in admitted]
    if (
        queue
        and admitted_seqs
        and max(seq.place for seq in admitted_seqs) > queue[0].place
    ):
        pairs = [
            (passed_seq, passing_seq)
            for passed_seq in queue
            for passing_seq in admitted_seqs
            if passing_seq.place > passed_seq.place
        ]
        wrong = [
            passed_seq.id
            for passed_seq, passing_seq in pairs
            if not _may_pass(config, planning, passed_seq, passing_seq)
            and not without_adapter(config, after, passed_seq)
        ]
        require(not wrong, "order", f"samples were overtaken: {wrong[:3]}")
    if before.running.seqs and victims:
        seqs = (*after.running.seqs, *after.waiting)
        # the id of an ended sample may be in use again
        places = {seq.place[1:] for seq in seqs}
        were_running = [seq for seq in before.running.seqs if seq.place[1:] in places]
        stayed = [seq for seq in seqs if seq.id not in victims]
        place, name = min((seq.place, seq.id) for seq in (*were_running, *stayed))
        ahead = [
            seq
            for seq in after.running.seqs
            if seq.id in victims and seq.id != name and seq.place < place
        ]
        is_valid = ahead or name not in victims
        require(is_valid, "order", "the first in rank was preempted")


def _may_pass(
    config: EngineConfig, planning: Planning, passed: Sequence, passing: Sequence
) -> bool:
    """Whether `passing` may pass `passed`: the client of `passed` was deferred, and that
    of `passing` not, or `passing` had run before.
    """
    if planning.deferred is None:  # it may have been, if the policy ever defers
        is_deferred = may_defer(config)
    else:
        is_deferred = passed.request.client in planning.deferred
    other_client = passing.request.client != passed.request.client
    return is_deferred and not passed.ran_before and (other_client or passing.ran_before)


def _candidates(after: EngineState, max_loading: int) -> list[Sequence]:
    """The waiting samples whose client is not deferred, and whose blocks are not on their
    way, in order.
    """
    loading = after.tiers.loading
    if len(loading) >= max_loading:
        return []
    return [
        seq
        for seq in after.waiting
        if (seq.ran_before or seq.request.client not in after.deferred_clients)
        and seq.request.id not in loading
    ]


def _check_deferred(books: Books, turn: Transition, planning: Planning) -> None:
    """Check that others run, or were just admitted, and that the policy, called once
    more, still defers each deferred client.
    """
    config, after = books.config, turn.state
    require(after.running.seqs, "held", "clients are deferred, and no sample runs")
    if any(isinstance(reason, PolicyOverride) for reason in turn.reasons):
        return
    firsts = dict[str, Sequence]()
    clients = {seq.id: seq.request.client for seq in after.running.seqs}
    for seq in after.waiting:
        if not seq.ran_before and seq.request.client in after.deferred_clients:
            firsts.setdefault(seq.request.client, seq)
    last_clients = [clients.get(name) for name in planning.last_admitted]
    # Admitted by the last plan, or before it.
    unopened_clients = [clients.get(name) for name in planning.unopened]
    last = planning.plans[-1] if planning.plans else None
    before = after if last is None else evolve(after, next_step=last.step)
    paused = last is None and _are_all_paused(books)
    for client, seq in firsts.items():
        load = evolve(current_load(config, before), paused=paused)
        count = last_clients.count(client)
        counts = range(count, count + unopened_clients.count(client) + 1)
        answers = (
            config.policy.defer(after.policy, seq.request, load, n) for n in counts
        )
        is_deferred = any(answer for answer, _ in answers)
        detail = f"{seq.id} may be admitted, and its client is deferred"
        require(is_deferred, "held", detail)


def _are_all_paused(books: Books) -> bool:
    """Whether all running samples are paused and skip the step."""
    seats = (
        (account, account.seat) for account in books.running if account.seat is not None
    )
    return all(
        account.paused and is_paused(books.config, account, seat)
        for account, seat in seats
    )


def _check_starved(config: EngineConfig, after: EngineState, planning: Planning) -> None:
    """Check that a row waits for a block only while none is available, and one is
    coming.
    """
    starved = planning.starved
    if starved and not planning.preempted:
        running = after.running
        places = [running.ids.index(name) for name in starved if name in running.ids]
        needed = [_pages_of_next(config, after, i) for i in sorted(places)[:1]]
        none_available = after.blocks.available < min(needed, default=1)
        require(none_available, "left out", f"{starved} could have a block")
        runs_alone = len(after.running) == 1
        # Beside paused samples, a preemption may have to wait for results.
        results = after.paused and after.inflight
        coming = after.fences or runs_alone or results or _leave_windows(config, after)
        coming = coming or _is_loading(after) or _saved_pages(after) > 0
        require(coming, "left out", f"{starved} wait, and no block is coming")


def _pages_of_next(config: EngineConfig, after: EngineState, i: int) -> int:
    """The pages of one more block in each group whose table ends where others do, or
    before.
    """
    pairs = [*zip(after.running.tables[i], config.block_groups, strict=False)]
    blocks = min(len(table) // group.pages for table, group in pairs)
    missing = (
        group.pages for table, group in pairs if len(table) == blocks * group.pages
    )
    return sum(missing)


def _leave_windows(config: EngineConfig, after: EngineState) -> bool:
    """Whether blocks leave windows once the steps in flight are over."""
    run, size = after.running, config.block_size
    return bool(config.by_chunk and after.inflight) and any(
        outside(run.scheduled[i], group.window, size)
        > max(run.chains[i].low[g], group.sink_blocks(size))
        for i in range(len(run))
        for g, group in enumerate(config.block_groups)
    )


def _check_head(
    books: Books, turn: Transition, planning: Planning, *, tried: bool
) -> None:
    """Check that the head of the queue could not be admitted, even by a preemption."""
    config, after = books.config, turn.state
    if tried:  # one more try, which made no plan
        planning.record(None)
    candidates, blocked = _candidates(after, config.max_num_seqs), after.blocked
    unready = _unready(books, after, candidates, planning, tried=tried)
    head = next((seq for seq in candidates if seq.id not in unready), None)
    seq = head or next(iter(after.waiting))
    if blocked is not None and blocked.cause == "policy":  # it delays loads, too
        seq = next(iter(after.waiting))
    if blocked is None or blocked.place != seq.place:
        raise InvariantError(
            "held", f"{seq.id} is the head of the queue, and nothing blocks it"
        )
    claim = blocked.cause
    if claim == "policy":
        return  # that is up to the policy: see its promises
    if after.deferred_clients:
        _check_deferred(books, turn, planning)
    none_free = claim in _causes_of_all(after, candidates, unready)
    require(none_free == (head is None), "held", f"{seq.id} for {claim}")
    if head is None:
        return
    if claim == "budget":
        _check_budget(config, seq, planning)
        return
    needed = pages_needed(config, after, seq)
    available, last_plan = after.blocks.available, next(iter(planning.plans[-1:]), None)
    if last_plan is not None:  # its saves took pages after that
        available -= held_for_copies(last_plan, after)
        available += sum(len(save.pages) for save in last_plan.saves)
    last_admitted = planning.last_admitted
    causes = [_cause(config, after, seq, last_admitted, short=needed > available)]
    if planning.unopened:  # by the last plan, or before it
        last_admitted = last_admitted | planning.unopened
        causes.append(_cause(config, after, seq, last_admitted, short=needed > available))
    cause = claim if claim in causes else causes[0]
    detail = f"{seq.id} for {claim}, but it needs {needed} of {available} blocks"
    require(cause, "held", detail)
    require(cause == claim, "held", f"{seq.id} for {claim}; it is {cause}")
    if cause in ("blocks", "rows"):
        _check_inversion(config, turn, seq, cause)
    may_grow = config.speculation is not None  # tables may grow
    # A save may evict what the head of the queue would have hit.
    saves = last_plan is not None and bool(last_plan.saves)
    if not (may_grow or saves) and len(planning.plans) == 1:
        _check_figures(turn, seq, needed, available)


def _unready(
    books: Books,
    after: EngineState,
    candidates: list[Sequence],
    planning: Planning,
    *,
    tried: bool,
) -> set[SampleId]:
    """The samples that the last plan had to pass over for their adapters."""
    delayed = after.blocked is not None and after.blocked.cause == "policy"
    sure = tried and not delayed and not planning.preempted
    return unready_samples(books, after, candidates, tried=sure)


def _causes_of_all(
    after: EngineState, candidates: list[Sequence], unready: Collection[SampleId]
) -> tuple[str, ...]:
    """What the whole queue may wait for, if none of it can be admitted."""
    if unready:
        return ("adapter",)
    others = "loading" if after.tiers.loading else "share"
    # Some may have been passed for their adapters before a load of blocks began.
    return (others,) if candidates else (others, "adapter")


def _cause(
    config: EngineConfig,
    after: EngineState,
    seq: Sequence,
    last_admitted: Collection[SampleId],
    *,
    short: bool,
) -> str:
    """What the head of the queue has to wait for, if anything; `last_admitted` were
    admitted by the last plan, and blocks are `short` or not.
    """
    if not after.free_rows:
        return "rows"
    if _waits_for_sibling(config, after, seq, last_admitted):
        return "sibling"
    return "blocks" if short else ""


def _check_budget(config: EngineConfig, seq: Sequence, planning: Planning) -> None:
    """Check that the last plan used up the budget for which the head of the queue
    waits.
    """
    budget = planning.budget(config, len(planning.plans) - 1)
    plan = planning.plans[-1]
    used = planning.used if plan is not None else 0
    spent = budget is None or used >= budget or planning.preempted
    require(spent, "held", f"{seq.id} for budget: {used} of {budget}")


def _check_inversion(
    config: EngineConfig, turn: Transition, seq: Sequence, cause: str
) -> None:
    """Check that the head of the queue may not preempt the last running sample."""
    after = turn.state
    coming = after.fences or _is_loading(after) or _saved_pages(after)
    if coming or not after.running.seqs:
        return
    last = after.running.seqs[-1]
    overridden = any(isinstance(reason, PolicyOverride) for reason in turn.reasons)
    if seq.place < last.place and not overridden:
        policy, waiting_rank, running_rank = config.policy, seq.place[0], last.place[0]
        preempts = policy.may_preempt(after.policy, waiting_rank, running_rank) is True
        detail = f"{seq.id} waits for {cause}, and {last.id} runs"
        require(not preempts, "inversion", detail)


def _check_figures(turn: Transition, seq: Sequence, needed: int, available: int) -> None:
    """Check the figures of the last `QueueBlocked`."""
    for reason in [r for r in turn.reasons if isinstance(r, QueueBlocked)][-1:]:
        if (reason.id, reason.sample) == seq.id and reason.cause == "blocks":
            is_true = (reason.needs, reason.available) == (needed, available)
            require(is_true, "reason", f"{reason}: it needs {needed} of {available}")


def _waits_for_sibling(
    config: EngineConfig,
    after: EngineState,
    seq: Sequence,
    last_admitted: Collection[SampleId],
) -> bool:
    """Whether a sample waits for the prompt's KV, which a sibling is computing."""
    if seq.request.n == 1 or len(seq.history) != len(seq.request.prompt):
        return False
    owner, run = seq.request.id, after.running
    siblings = [i for i, name in enumerate(run.ids) if name[0] == owner]
    first = next((i for i in siblings if run.ids[i] not in last_admitted), None)
    if first is None:
        return bool(siblings)
    return committed(config, after, first) < len(seq.history) - 1


def check_free_order(before: Pool, after: Pool) -> None:
    """Raise InvariantError unless free blocks are allocated in their order: in a turn
    that releases none, and if `spare` has enough, the first of them are.
    """
    old_order, new_order = _free_order(before), _free_order(after)
    num_taken = len(old_order) - len(new_order)
    if set(new_order) <= set(old_order) and num_taken <= len(before.spare):
        in_order = new_order == old_order[num_taken:]
        require(in_order, "free order", f"{new_order[:9]} are left of {old_order[:9]}")


def _free_order(pool: Pool) -> list[int]:
    """The free blocks, in the order of allocation."""
    runs = [pool.freed[depth] for depth in sorted(pool.freed, reverse=True)]
    return [*pool.spare, *chain(*runs), *range(pool.fresh, pool.total)]


def check_evictions(
    before: PrefixIndex, after: PrefixIndex, dropped: Collection[Key] = ()
) -> None:
    """Raise InvariantError unless the blocks evicted in a turn were the least recently
    used, but for states that may be `dropped`.

    Only blocks that were idle before the turn are compared: those that keep their ticket
    were not held in it, so none of them may be older than an evicted one. A parent was
    last used when it or one of its cached descendants was.
    """
    last_evicted, first_kept = -1, after.next_use
    old_nodes, nodes = every_node(before), every_node(after)
    for key, last_use in _last_uses(before, old_nodes).items():
        if key not in dropped and not _is_same_block(old_nodes, nodes, key):
            last_evicted = max(last_evicted, last_use)
    for last_use, key in before.idle.items():
        if _is_same_block(old_nodes, nodes, key) and after.idle.get(last_use) == key:
            first_kept = min(first_kept, last_use)
    require(
        last_evicted < first_kept,
        "eviction",
        f"last used at {last_evicted} is gone, at {first_kept} is kept",
    )
    for last_use, key in after.idle.items():
        if not _is_same_block(old_nodes, nodes, key):
            continue
        if old_nodes[key].users and not old_nodes[key].children:
            is_recent = last_use >= before.next_use
            pages = nodes[key].pages
            detail = f"block {pages} was in use, and has the old last use {last_use}"
            require(is_recent, "eviction", detail)


def _last_uses(prefix: PrefixIndex, nodes: dict[Key, Node]) -> dict[Key, int]:
    """The last use of each idle block or of its cached descendants."""
    last_uses = dict[Key, int]()
    for last_use, leaf in prefix.idle.items():
        latest, key = last_use, leaf
        while key in nodes and not nodes[key].users:
            latest = max(latest, nodes[key].last_use)
            last_uses[key] = max(last_uses.get(key, -1), latest)
            key = nodes[key].parent
    return last_uses


def _is_same_block(old_nodes: dict[Key, Node], nodes: dict[Key, Node], key: Key) -> bool:
    """Whether the same block has this content as before."""
    in_both = key in old_nodes and key in nodes
    return in_both and old_nodes[key].pages == nodes[key].pages


def _check_reasons(before: EngineState, turn: Transition) -> None:
    """Check that `QueueBlocked` is reported when it changed, and truly."""
    after, reasons = turn.state, [r for r in turn.reasons if isinstance(r, QueueBlocked)]
    for reason in reasons:
        require(reason.cause in _CAUSES, "reason", f"{reason}: what cause is that?")
        is_true = reason.cause != "blocks" or reason.needs > reason.available
        require(is_true, "reason", f"{reason} is not held")
    if after.blocked is not None and after.blocked != before.blocked:
        place, cause = after.blocked.place, after.blocked.cause
        is_reported = (
            reasons and reasons[-1].cause == cause and place[2] == reasons[-1].sample
        )
        detail = f"{after.blocked} is news, but the last word is {reasons[-1:]}"
        require(is_reported, "reason", detail)
    plans = sum(isinstance(c, Execute) for c in turn.commands)
    require(len(reasons) <= 1 + plans, "reason", f"{reasons}")
