"""The projection of a state to facts, of which digests of whole states are made.

Records change as the engine is rebuilt; a journal's digests must not. So a digest is not
of records but of this: named facts in JSON types, with names of their own, independent of
the engine's representation. How free blocks are stored, for example, is left out; the
order in which they are allocated is a fact. A change of a record must keep its facts
here; a change of the facts themselves must increase `minfer.journal.format.FORMAT`.

Token ids and content keys are no part of it, so that a journal without them has the same
digests. Derived values are left out, too: when a table is looked at next, which tokens
have a key.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from minfer.blocks.keys import Key
from minfer.blocks.ownership import Blocks
from minfer.blocks.prefix import ROOT, Pages, PrefixIndex, every_node, pages_of
from minfer.journal.codec import dump
from minfer.journal.decisions import compact
from minfer.records.adapters import Adapters
from minfer.records.drafting import NOTHING_DRAFTED, Drafting, SampleAcceptance
from minfer.records.plan import Plan
from minfer.records.sequence import Chain, Running, Sequence, Tables
from minfer.records.state import EngineState, LiveRequest
from minfer.records.step_times import NOT_MEASURED, StepTimes


def state_digest(state: EngineState) -> bytes:
    """A digest of a state, without token ids and content keys: 16 bytes."""
    return blake2b(compact(projected(state)), digest_size=16).digest()


def projected(state: EngineState) -> dict[str, Any]:
    """The facts of a state, in JSON types."""
    blocked, prefix = state.blocked, state.blocks.prefix
    paused = [list(name) for name in sorted(state.paused)]
    drafting, times = _drafting(state.drafting), state.step_times
    return {
        **({"paused": paused} if paused else {}),
        **({"drafting": drafting} if drafting else {}),
        **({"adapters": _adapters(state.adapters)} if state.adapters.slots else {}),
        **({"step times": _step_times(times)} if times != NOT_MEASURED else {}),
        "time": state.time,
        "next step": state.next_step,
        "next generation": state.next_run_id,
        "arrivals": state.arrivals,
        "blocks": _blocks(state.blocks),
        "free rows": list(state.free_rows),
        "waiting": [_sequence(seq) for seq in state.waiting],
        "running": list(_running(state.running, prefix)),
        "in flight": [_plan(plan) for plan in state.inflight],
        "fences": [
            {
                "until": fence.until,
                "published": [_block(prefix, key) for key in fence.published],
                "private": list(fence.private),
            }
            for fence in state.fences
        ],
        "failed steps": [[*sample, count] for sample, count in state.faults],
        "blocked": None
        if blocked is None
        else {"place": list(blocked.place), "cause": blocked.cause},
        "requests": {name: _live(state.requests[name]) for name in state.requests},
        "policy": dump(state.policy),
    }


def _step_times(times: StepTimes) -> list[Any]:
    return [times.began, times.decode, times.token, times.tokens]


def _drafting(drafting: Drafting) -> dict[str, Any]:
    """The facts of speculation; none as long as there were no drafts."""
    if drafting == NOTHING_DRAFTED:
        return {}
    proposals = sorted(drafting.proposals.items())
    return {
        "proposed": [[*name, p.known, len(p.tokens)] for name, p in proposals],
        "acceptance": [
            [*name, *_learnt(acceptance)]
            for name, acceptance in sorted(drafting.learnt.items())
        ],
        "overall": _learnt(drafting.overall),
    }


def _learnt(learnt: SampleAcceptance) -> list[Any]:
    return [learnt.step, repr(learnt.record.judged), repr(learnt.record.accepted)]


def _blocks(blocks: Blocks) -> dict[str, Any]:
    pool, prefix = blocks.pool, blocks.prefix
    nodes = every_node(prefix)
    stack = [pool.freed[depth] for depth in sorted(pool.freed, reverse=True)]
    return {
        "free": pool.free,
        "handed out next": [block for run in (pool.spare, *stack) for block in run],
        "never used from": pool.fresh,
        "next use": prefix.next_use,
        "evicted next": [_block(prefix, prefix.idle[use]) for use in sorted(prefix.idle)],
        "published": [
            {
                "block": _bundle(node.pages),
                "parent": _block(prefix, node.parent),
                "users": node.users + prefix.pinned.get(key, 0),
                "children": node.children,
                "last use": node.last_use,
            }
            for key, node in sorted(nodes.items(), key=lambda item: item[1].pages)
        ],
    }


def _block(prefix: PrefixIndex, key: Key) -> int:
    """The first page of the block that has this content; -1 for none, before a first
    block.
    """
    return -1 if key == ROOT else pages_of(prefix, (key,))[0]


def _bundle(pages: Pages) -> Any:
    """A block: the number of its page, or of each if there are several."""
    return pages[0] if len(pages) == 1 else list(pages)


def _adapters(adapters: Adapters) -> dict[str, Any]:
    """The slots, without the names of adapters."""
    blocked = adapters.slot_blocked
    return {
        "slots": [
            [
                bool(slot.adapter),
                slot.loading,
                slot.users,
                slot.last_step,
                slot.last_use,
                slot.passes,
                slot.dropped,
            ]
            for slot in adapters.slots
        ],
        "uses": adapters.uses,
        "blocked": None if blocked is None else [list(blocked[0]), *blocked[1:]],
    }


def _sequence(seq: Sequence) -> dict[str, Any]:
    return {
        "request": seq.request.id,
        "sample": seq.sample,
        "place": list(seq.place),
        "arrived": seq.arrived,
        "history": len(seq.history),
        "preempted": seq.preempted,
        "cached": seq.cached,
    }


def _running(run: Running, prefix: PrefixIndex) -> Iterator[dict[str, Any]]:
    for i, seq in enumerate(run.seqs):
        yield {
            "sequence": _sequence(seq),
            "run_id": run.run_ids[i],
            "row": run.rows[i],
            "start": run.starts[i],
            "num_known_at_admission": run.num_known_at_admission[i],
            "known": run.known[i],
            "scheduled": run.scheduled[i],
            "last_index": run.last_index[i],
            "leaf": _block(prefix, run.chains[i].leaf),
            **_tables(run.tables[i], run.chains[i]),
            **({"states": _states(run, i, prefix)} if prefix.state_group else {}),
        }


def _states(run: Running, i: int, prefix: PrefixIndex) -> dict[str, Any]:
    """The working state of a sequence, and its kept ones."""
    states = run.chains[i].states
    kept = [key for key in states.kept if key in prefix.nodes]
    has_checkpoint = states.checkpoint in prefix.nodes
    return {
        "working": list(run.tables[i][-1]),
        "starts from": _block(prefix, states.origin),
        "kept": [_block(prefix, key) for key in kept],
        "checkpoint": _block(prefix, states.checkpoint) if has_checkpoint else -1,
        "shared": states.shared,
        "last": states.last,
        "save at": states.save_at,
    }


def _tables(tables: Tables, chain: Chain) -> dict[str, Any]:
    """The table of a sequence; those of further groups are apart."""
    first, *more_groups = (
        {"table": list(table), "sealed": sealed, "behind the window": low}
        for table, sealed, low in zip(tables, chain.sealed, chain.low, strict=False)
    )  # the working state, which has no blocks, is the last table
    return {**first, "more groups": more_groups} if more_groups else first


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "step": plan.step,
        "run_ids": list(plan.run_ids),
        "rows": list(plan.rows),
        "starts": list(plan.starts),
        "num_scheduled_tokens": list(plan.num_scheduled_tokens),
        "max_sampled_tokens": list(plan.max_sampled_tokens),
        **({"saves": _saves(plan)} if plan.saves else {}),
    }


def _saves(plan: Plan) -> list[Any]:
    return [
        [save.index, list(save.pages), *([save.inside] if save.inside else ())]
        for save in plan.saves
    ]


def _live(live: LiveRequest) -> dict[str, Any]:
    return {
        "place": list(live.place),
        "samples": live.samples,
        "ended": live.ended,
        "moved": [list(sample) for sample in live.moved],
    }
