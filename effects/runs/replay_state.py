"""A state of the engine, for people: the output of `minfer replay --at`."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from attrs import fields_dict, has

from minfer.journal.replay import Journal
from minfer.records.config import EngineConfig
from minfer.records.sequence import Sequence
from minfer.records.state import EngineState
from minfer.records.tiers import TransferKind
from minfer.values.pmap import Map

_TRANSFERS: Final = {
    TransferKind.STORE_TO_HOST: "stores {} blocks of host memory",
    TransferKind.LOAD_FROM_HOST: "loads {} blocks of host memory",
    TransferKind.STORE_TO_EXTERNAL: "stores {} blocks by key",
    TransferKind.FETCH_FROM_EXTERNAL: "loads {} blocks by key",
}
_MAX_LISTED: Final = 20  # sequences in the list


def summary_line(name: str, text: str) -> str:
    """A line of a summary."""
    return f"{name:<11}{text}"


def render_state(journal: Journal) -> str:
    """The state that a replay has reached, as text."""
    state, config = journal.state, journal.config
    lines = [
        summary_line("state", f"before turn {journal.count}, at {state.time:.6f} s"),
        summary_line("blocks", _blocks(config, state)),
        summary_line("in flight", _in_flight(state)),
        summary_line(
            "policy", f"{_plain(config.policy)}, its state {_plain(state.policy)}"
        ),
    ]
    if state.blocked and state.waiting:
        cause = f"the head of the queue waits for {state.blocked.cause}"
        lines.append(summary_line("blocked", cause))
    lines += _tiers(config, state)
    return "\n".join([*lines, *_running(state), *_waiting(state)])


def _plain(value: Any) -> str:
    """A value as Python writes it, its maps as dicts in a fixed order."""
    if isinstance(value, Map):
        pairs = sorted(
            f"{_plain(key)}: {_plain(element)}" for key, element in value.items()
        )
        return "{" + ", ".join(pairs) + "}"
    if has(type(value)):
        names = fields_dict(type(value))
        fields = (f"{name}={_plain(getattr(value, name))}" for name in names)
        return f"{type(value).__name__}({', '.join(fields)})"
    return repr(value)


def _blocks(config: EngineConfig, state: EngineState) -> str:
    pool = state.blocks
    private = config.num_blocks - pool.free - pool.idle - pool.live
    return (
        f"{pool.free} free, {pool.idle} cached, {pool.live} published and in "
        f"use, {private} private, of "
        f"{config.num_blocks}"
    )


def _in_flight(state: EngineState) -> str:
    steps = [
        f"step {plan.step} ({len(plan.run_ids)} rows, "
        f"{sum(plan.num_scheduled_tokens)} tokens)"
        for plan in state.inflight
    ]
    return ", ".join(steps) or "nothing"


def _tiers(config: EngineConfig, state: EngineState) -> Iterator[str]:
    tiers = state.tiers
    if config.host is not None and tiers.host is not None:
        used = config.host.pages - tiers.host.free
        waits = f"{len(tiers.host_queue)} blocks wait to be stored"
        yield summary_line("host", f"{used} of {config.host.pages} pages used, {waits}")
    if config.external_store is not None:
        num_known = len({*tiers.external_keys.young, *tiers.external_keys.old})
        waits = f"{len(tiers.external_queue)} wait to be stored"
        location = "believed to be on disk or sent by another engine"
        yield summary_line("by key", f"{num_known} blocks {location}, {waits}")
    for transfer in tiers.transfers[:_MAX_LISTED]:
        action = _TRANSFERS[transfer.kind].format(len(transfer.keys))
        waiters = (
            f", for {', '.join(map(repr, sorted(transfer.waiting)))}"
            if transfer.waiting
            else ""
        )
        yield f"  transfer {transfer.number}: {action}{waiters}"


def _running(state: EngineState) -> Iterator[str]:
    run = state.running
    yield summary_line("running", f"{len(run)} sequences, in rank order")
    for i, seq in enumerate(run.seqs[:_MAX_LISTED]):
        filled = (
            " (its prompt)" if run.scheduled[i] < run.num_known_at_admission[i] else ""
        )
        yield (
            f"  {_name(seq)}: row {run.rows[i]}, knows {run.known[i]} of up to "
            f"{run.last_index[i] + 1} tokens, planned to {run.scheduled[i]}{filled}, "
            f"{len(run.tables[i])} blocks, {run.chains[i].sealed} published"
        )


def _waiting(state: EngineState) -> Iterator[str]:
    yield summary_line(
        "waiting", f"{len(state.waiting)} sequences, head of the queue first"
    )
    for seq in islice(state.waiting, _MAX_LISTED):
        preempted = f", preempted {seq.preempted} times" if seq.preempted else ""
        since = f"since {seq.arrived:.6f} s, {len(seq.history)} tokens"
        yield f"  {_name(seq)}: {since}{preempted}"


def _name(seq: Sequence) -> str:
    has_several = seq.request.n > 1
    return repr(seq.request.id) + (f" sample {seq.sample}" if has_several else "")
