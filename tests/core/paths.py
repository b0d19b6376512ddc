"""How often the worlds take each path of the core that begins at a size, or that is rare.

Told from outside, by what states and turns look like: the core is as it is when it
serves.
"""

from collections import Counter
from collections.abc import Sequence

from minfer.blocks.keys import is_state
from minfer.policies.fair_queue import Accounts
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    AdapterLoading,
    AdapterLost,
    Admitted,
    Cancel,
    Discarded,
    Emit,
    Event,
    Execute,
    Executed,
    Finish,
    Move,
    Preempted,
    Propose,
    SavesSkipped,
    SlotBlocked,
    StateMissed,
    Submit,
    WindowMissed,
)
from minfer.records.policy import ADAPTER_PASSES
from minfer.records.sequence import Running
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import TransferKind
from minfer.values import thresholds

LARGE = (
    "line in buckets",
    "log in two levels",
    "runs of freed blocks",
    "aligned past a window",
    "fresh tokens kept",
    "stop ids sorted out",
    "prefix of a neighbour",
)
RARE = (
    "preempted",
    "displaced",
    "evicted",
    "copied",
    "slid",
    "several groups",
    "hit shortened by a window",
    "voided",
    "blamed",
    "clients forgotten",
    "submitted again",
    "id used anew",
    "resumed",
    "ended while filled",
    "all at once",
    "hit shortened by a state",
    "kept state taken over",
    "kept state gone",
    "working states lost",
    "state loaded",
    "saves skipped",
)
ADAPTERS = (
    "adapter loaded",
    "adapter in the place of another",
    "adapter lost",
    "adapter dropped in use",
    "waits for a slot",
    "slot closed",
)
BIG = (
    "line of more than 128",
    "pool of hundreds",
    "hit of more than 32 blocks",
    "vocabulary above 65,536",
    "more than 64 running",
)
EXECUTING = (
    "drafts accepted",
    "drafts rejected",
    "host drafts",
    "device drafts",
    "drafts sampled apart",
    "proposals",
    *TransferKind,
    "moved",
    "lost",
    "sampled apart",
    "paused",
    "pooled: last",
    "pooled: mean",
    "scored",
    "state saved",
    "state copied",
)
PATHS = (*LARGE, *RARE, *ADAPTERS, *BIG, *EXECUTING)


def taken(
    config: EngineConfig, before: EngineState, events: Sequence[Event], turn: Transition
) -> Counter[str]:
    """The paths that one turn took."""
    after, seen = turn.state, Counter[str]()
    run = after.running
    seen["line in buckets"] = len(after.waiting.buckets) > 1
    seen["line of more than 128"] = len(after.waiting) > 128
    seen["more than 64 running"] = len(run) > 64
    seen["log in two levels"] = any(
        table.old for tables in run.tables for table in tables
    )
    seen["runs of freed blocks"] = len(after.blocks.pool.freed) > 0
    was, now = before.blocks.prefix.nodes, after.blocks.prefix.nodes
    seen["evicted"] = was is not now and any(key not in now for key in was)
    seen["slid"] = any(any(chain.low) for chain in run.chains)
    seen["several groups"] = len(config.groups) > 1
    seen["vocabulary above 65,536"] = config.vocab_size > 65_536
    seen["pool of hundreds"] = config.num_blocks >= 200
    _results(before, events, seen)
    _decisions(config, before, turn, seen)
    if config.state_group is not None:
        _states(config, before, turn, seen)
    if config.adapter_slots:
        _adapters(turn, seen)
    if isinstance(before.policy, Accounts):
        was_known, known = len(before.policy.by_owner), len(after.policy.by_owner)
        seen["clients forgotten"] = known < was_known
    return +seen


def _states(
    config: EngineConfig, before: EngineState, turn: Transition, seen: Counter[str]
) -> None:
    """What becomes of states of recurrent layers."""
    group, after = config.state_group or 0, turn.state.blocks.prefix.nodes
    plans = [c.plan for c in turn.commands if isinstance(c, Execute)]
    for plan in plans:
        copied = {copy.target for copy in plan.copies}
        behind = [row for row in plan.opens if plan.starts[row.index]]
        seen["state saved"] += len(plan.saves)
        seen["state copied"] += bool(plan.copies)
        seen["kept state taken over"] += any(
            copied.isdisjoint(row.tables[-1]) for row in behind
        )
    kept = [key for key in before.blocks.prefix.nodes if is_state(key, group)]
    seen["kept state gone"] = any(key not in after for key in kept)
    missed = [r for r in turn.reasons if isinstance(r, StateMissed)]
    seen["hit shortened by a state"] = len(missed)
    seen["saves skipped"] = any(isinstance(r, SavesSkipped) for r in turn.reasons)
    lost = [r for r in turn.reasons if isinstance(r, Discarded)]
    seen["working states lost"] = any(r.rows for r in lost)
    loads = (c for c in turn.commands if isinstance(c, Move) and c.kind.to_device)
    numbers = {load.number for load in loads}
    moving = (t for t in turn.state.tiers.transfers if t.number in numbers)
    seen["state loaded"] = any(is_state(key, group) for t in moving for key in t.keys)


def _adapters(turn: Transition, seen: Counter[str]) -> None:
    """What becomes of adapters and their slots."""
    slots = turn.state.adapters.slots
    seen["slot closed"] = any(slot.passes >= ADAPTER_PASSES for slot in slots)
    seen["adapter dropped in use"] = any(slot.dropped and slot.users for slot in slots)
    for reason in turn.reasons:
        match reason:
            case AdapterLoading(evicted=evicted):
                seen["adapter loaded"] += 1
                seen["adapter in the place of another"] += evicted != ""
            case AdapterLost(ended=ended):
                seen["adapter lost"] += ended > 0
            case SlotBlocked():
                seen["waits for a slot"] += 1


def _results(before: EngineState, events: Sequence[Event], seen: Counter[str]) -> None:
    plan = before.inflight[0] if before.inflight else None
    kinds = {type(event) for event in events}
    good = Executed in kinds and plan is not None
    if good and plan is not None:
        sizes = len(plan.run_ids), thresholds.ALIGNED_WINDOW
        seen["aligned past a window"] = (
            plan.run_ids != before.running.run_ids and sizes[0] > sizes[1]
        )
        seen["fresh tokens kept"] = plan.step % thresholds.FRESH_STEPS > 0
    seen["submitted again"] = any(
        isinstance(event, Submit) and event.request.id in before.requests
        for event in events
    )
    several = any(
        isinstance(event, Cancel)
        and event.id in before.requests
        and before.requests[event.id].samples > 1
        for event in events
    )
    seen["paused"] = len(before.paused) > 0
    drafts = plan.drafts if good and plan is not None else ()
    seen["host drafts"] = any(draft.tokens for draft in drafts)
    seen["device drafts"] = any(not draft.tokens for draft in drafts)
    seen["proposals"] = Propose in kinds
    seen["all at once"] = several and Finish in kinds and len(kinds) > 3


def _decisions(
    config: EngineConfig, before: EngineState, turn: Transition, seen: Counter[str]
) -> None:
    after, admitted = turn.state, list[Admitted]()
    waiting = {seq.id for seq in before.waiting}
    for reason in turn.reasons:
        match reason:
            case Admitted():
                admitted.append(reason)
                seen["copied"] += reason.copied > 0
                seen["resumed"] += reason.known > reason.prompt > 0
            case WindowMissed():
                seen["hit shortened by a window"] += 1
            case Preempted():
                seen["preempted"] += 1
                seen["displaced"] += reason.by in waiting
            case Discarded():
                seen["voided"] += 1
    for command in turn.commands:
        if isinstance(command, Emit):
            seen["blamed"] += sum(done.reason == "error" for done in command.finished)
            if command.finished and any(
                isinstance(c, Execute) and c.plan.fills for c in turn.commands
            ):
                seen["ended while filled"] += 1
    seen["stop ids sorted out"] = bool(
        admitted
        and len(before.stops) > thresholds.STOP_IDS
        and after.stops < before.stops
    )
    for got in admitted:
        blocks = got.hit // config.block_size
        seen["hit of more than 32 blocks"] += blocks > 32
        for g, group in enumerate(config.block_groups):
            if blocks >= thresholds.LONG_PREFIX and not group.window:
                pages = blocks * group.pages
                seen["prefix of a neighbour"] += _neighbour(after.running, got, g, pages)


def _neighbour(run: Running, got: Admitted, g: int, pages: int) -> bool:
    """Whether another running sample has the same table as far as a newcomer's hit."""
    name = (got.id, got.sample)
    if name not in run.ids:
        return False
    mine = run.tables[run.ids.index(name)][g][:pages]
    few = thresholds.NEIGHBOURS
    near = zip(run.ids[-few - 1 :], run.tables[-few - 1 :], strict=True)
    return any(other != name and tables[g][:pages] == mine for other, tables in near)
