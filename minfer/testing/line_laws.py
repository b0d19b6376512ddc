"""The specification of the line: who is let in, who gives way, and who must not be left
waiting.

After the last plan of a turn the first in line is looked at once more: what it needs and
what there is are computed here in the plainest way (block by block, from the index), and
if nothing stands in its way it should not be in line.
"""

from collections.abc import Mapping
from typing import Final

from minfer.committed import committed
from minfer.config import EngineConfig
from minfer.messages import Execute, Held, Overruled, WakeAt
from minfer.prefix import Node, PrefixIndex
from minfer.sequence import SampleId, Sequence
from minfer.state import EngineState, Transition
from minfer.testing.accounts import Account
from minfer.testing.invariants import InvariantError, require
from minfer.testing.lifetime import Stage
from minfer.testing.plan_laws import Planning, left_out, suspects
from minfer.window import outside

_NO_NODE: Final = Node(b"", 0, 0, 0, 0)


def check_line(
    config: EngineConfig,
    before: EngineState,
    turn: Transition,
    planning: Planning,
    accounts: Mapping[SampleId, Account],
) -> None:
    """Raise InvariantError unless the line moved as it must, as far as it could."""
    after = turn.state
    _ranks(before, after)
    _shortage(before, turn, planning)
    _order(before, after, planning)
    waits = [command for command in turn.commands if isinstance(command, WakeAt)]
    for wake in waits:
        require(wake.time > after.time, "wake", "a wait that is over")
    busy = waits or after.inflight or not after.requests
    require(busy, "work conservation", "requests, but nothing in flight")
    running = [one for one in accounts.values() if one.stage is Stage.RUNNING]
    planned = len(after.inflight) < config.depth or planning.plans
    alone = bool(suspects(config, running))
    if len(after.inflight) < config.depth and not alone:
        for one in running:
            why = left_out(config, one, after)
            require(
                why, "left out", f"{one.id} could run, and one more step can be planned"
            )
            if why == "blocks":
                planning.starved.append(one.id)
    _starved(after, planning)
    if planned and after.waiting and not alone:
        _first(config, turn, planning)
    _news(before, turn)


def _ranks(before: EngineState, after: EngineState) -> None:
    """A place in line is for life, whoever is preempted or restarted; it may only get
    better.
    """
    places = {seq.place[1:]: seq.place for seq in (*before.waiting, *before.running.seqs)}
    for seq in (*after.waiting, *after.running.seqs):
        kept = seq.place <= places.get(seq.place[1:], seq.place)
        require(kept, "order", f"{seq.id} lost its rank")


def _shortage(before: EngineState, turn: Transition, planning: Planning) -> None:
    """One shortage, one victim: while blocks behind a fence are coming, nobody is
    preempted.
    """
    old = [fence in before.fences for fence in turn.state.fences]
    require(
        not (planning.preempted and any(old)), "preemption", "though blocks were coming"
    )


def _order(before: EngineState, after: EngineState, planning: Planning) -> None:
    """Whoever was let in ranks before all who still wait, save those that had
    to go back.
    """
    back = {victim for victim, _ in planning.preempted}
    admitted = set(planning.admitted) - back
    line = [seq.place for seq in after.waiting if seq.id not in back]
    inside = [seq.place for seq in after.running.seqs if seq.id in admitted]
    require(
        not line or not inside or max(inside) < min(line),
        "order",
        "somebody was overtaken",
    )
    if before.running.seqs and back:
        here = (*after.running.seqs, *after.waiting)
        left = {
            seq.place[1:] for seq in here
        }  # of who ended, the id may be somebody else's now
        were = (seq for seq in before.running.seqs if seq.place[1:] in left)
        first = min(
            (s.place, s.id) for s in (*were, *(s for s in here if s.id not in back))
        )
        require(first[1] not in back, "order", "the first in rank was preempted")


def _starved(after: EngineState, planning: Planning) -> None:
    """A row waits for a block only while there is none, and only until one comes."""
    if planning.starved and not planning.preempted:
        require(
            not after.blocks.available,
            "left out",
            f"{planning.starved} could have a block",
        )
        coming = after.fences or len(after.running) == 1
        require(coming, "left out", f"{planning.starved} wait, and no block is coming")


def needs(config: EngineConfig, after: EngineState, seq: Sequence) -> int:
    """Blocks that letting `seq` in takes, of those that are available."""
    size, known, nodes, index = (
        config.block_size,
        len(seq.history),
        after.blocks.prefix.nodes,
        after.blocks.prefix.index,
    )
    full = (known - 1) // size
    cached = [index.get(key) for key in seq.keys[:full]]
    if config.window:
        hit = next(
            (
                hit
                for hit in range(full, 0, -1)
                if None not in cached[outside(hit * size, config.window, size) : hit]
            ),
            0,
        )
        low = outside(hit * size, config.window, size)
    else:
        hit, low = cached.index(None) if None in cached else full, 0
    idle = sum(block is not None and not nodes[block][2] for block in cached[low:hit])
    ends = min(len(seq.request.prompt) + seq.request.max_tokens, config.max_model_len)
    next_block = known % size == 0 and known + 1 < ends
    spare = max(config.watermark, next_block) if len(after.running) else 0
    return -(-known // size) - hit + idle + spare


def _first(config: EngineConfig, turn: Transition, planning: Planning) -> None:
    """The first in line could not be let in, and nobody had to make room for it."""
    after = turn.state
    if len(after.inflight) < config.depth:  # the last try made no plan
        planning.launched(None)
    seq, cause = after.waiting.first(), ""
    said = after.held
    if said is None or said.place != seq.place:
        raise InvariantError("held", f"{seq.id} is first in line, and nothing holds it")
    claim, wants, there = said.cause, needs(config, after, seq), after.blocks.available
    if claim == "policy":
        return  # that is the policy's own affair: see its promises
    if claim == "budget":
        budget, plan = (
            planning.budget(config, len(planning.plans) - 1),
            planning.plans[-1],
        )
        used = sum(plan.counts) if plan is not None else 0
        spent = budget is None or used >= budget or planning.preempted
        require(spent, "held", f"{seq.id} for budget: {used} of {budget}")
        return
    if not after.free_rows:
        cause = "rows"
    elif _sibling(config, after, seq, planning):
        cause = "sibling"
    elif wants > there:
        cause = "blocks"
    require(
        cause, "held", f"{seq.id} for {claim}, but it needs {wants} of {there} blocks"
    )
    require(cause == claim, "held", f"{seq.id} for {claim}; it is {cause}")
    if cause in ("blocks", "rows") and not after.fences and after.running.seqs:
        last = after.running.seqs[-1]
        overruled = any(isinstance(reason, Overruled) for reason in turn.reasons)
        if seq.place < last.place and not overruled:
            gives = (
                config.policy.displaces(after.policy, seq.place[0], last.place[0]) is True
            )
            require(
                not gives, "inversion", f"{seq.id} waits for {cause}, and {last.id} runs"
            )
    last_held = [r for r in turn.reasons if isinstance(r, Held)][-1:]
    steady = config.max_repeat == 1 and len(planning.plans) == 1
    for one in last_held if steady else ():
        if (one.id, one.sample) == seq.id and one.cause == "blocks":
            right = (one.needs, one.available) == (wants, there)
            require(right, "reason", f"{one}: it needs {wants} of {there}")


def _sibling(
    config: EngineConfig, after: EngineState, seq: Sequence, planning: Planning
) -> bool:
    """Whether a sample waits for the prompt's KV, which a sibling is computing."""
    if seq.request.n == 1 or len(seq.history) != len(seq.request.prompt):
        return False
    owner, run = seq.request.id, after.running
    siblings = [i for i, name in enumerate(run.ids) if name[0] == owner]
    first = next((i for i in siblings if run.ids[i] not in planning.lately), None)
    if first is None:
        return bool(siblings)
    return committed(config, after, first) < len(seq.history) - 1


def check_evictions(before: PrefixIndex, after: PrefixIndex) -> None:
    """Raise InvariantError unless what was evicted in a turn was unused for longest.

    Of blocks that were idle leaves before it: nobody can have stood on those that keep
    their ticket, so none of them was used earlier than one that is gone.
    """
    gone, kept = -1, after.next_use
    for last_use, block in before.idle.items():
        if after.nodes.get(block, _NO_NODE).key != before.nodes[block].key:
            gone = max(gone, last_use)
        elif after.idle.get(last_use) == block:
            kept = min(kept, last_use)
    require(gone < kept, "eviction", f"last used at {gone} is gone, at {kept} is kept")
    for last_use, block in after.idle.items():
        was = before.nodes.get(block)
        if was is None or was.key != after.nodes[block].key:
            continue
        if was.users and not was.children:
            late = last_use >= before.next_use
            told = f"block {block} was in use, and has the old last use {last_use}"
            require(late, "eviction", told)


def _news(before: EngineState, turn: Transition) -> None:
    """That somebody is held is said when it is news, and then truly."""
    after, told = turn.state, [r for r in turn.reasons if isinstance(r, Held)]
    for one in told:
        causes = ("blocks", "rows", "budget", "sibling", "policy")
        require(one.cause in causes, "reason", f"{one}: what cause is that?")
        require(
            one.cause != "blocks" or one.needs > one.available,
            "reason",
            f"{one} is not held",
        )
    news = after.held is not None and after.held != before.held
    if news and after.held is not None:
        place, cause = after.held.place, after.held.cause
        right = told and told[-1].cause == cause and place[2] == told[-1].sample
        require(
            right, "reason", f"{after.held} is news, but the last word is {told[-1:]}"
        )
    require(
        len(told) <= 1 + sum(isinstance(c, Execute) for c in turn.commands),
        "reason",
        f"{told}",
    )
