"""Which rows of a step have drafts, and how many.

Theory. Drafts take what a step has left: tokens of its budget that neither rows nor
prompts wanted, and blocks while there are plenty. So nobody is let in later, or gives
way, for the sake of a draft. How many pay is `length.py`'s to say, of what became of a
row's last ones and of what verifying costs; the policy bounds it. A device takes as many
inputs of each row with drafts as the deepest of them has, so it is these that have to fit
into the budget: what a plan says is what is verified.

A draft model says its drafts on the device, and steps are planned ahead as ever: how many
drafts of the step before were accepted, nobody needs to know. What the host drafts has to
be said with the plan, behind tokens that are known. So a step for which the host drafts
is planned when nothing is in flight, and none behind it before its results have come: not
of other rows either, as they would keep the drafting ones from every second step. What
that costs is among the costs by which it is decided whether it pays.

So a row that is bound to the host, as it is under a grammar, may have the host's drafts:
all before them is known, and its masks can be made for each place. A draft model's drafts
nobody could make masks for.
"""

from collections.abc import Iterable, Iterator

from attrs import frozen

from minfer import consult
from minfer.admit import load
from minfer.config import EngineConfig
from minfer.grow import make_room
from minfer.lay_out import ones
from minfer.pmap import Map
from minfer.record import evolve
from minfer.request import Request
from minfer.sequence import edited_column
from minfer.speculate.length import Row, lengths
from minfer.speculate.settings import HOST, Speculation
from minfer.state import EngineState
from minfer.work import Work


@frozen
class Drafter:
    """A running sample that may have drafts."""

    i: int  # its position among the running
    most: int  # drafts
    tokens: tuple[int, ...] = ()  # the host's, if those are what it may have


def may_draft(request: Request, drafter: str) -> bool:
    """Whether drafts can be made for a request: not for what yields no token; nor by a
    draft model for what is bound to the host, which has to know them.
    """
    bound = request.lockstep and drafter != HOST
    return not (bound or request.ends_with_prompt)


def waits_for_results(config: EngineConfig, state: EngineState) -> bool:
    """Whether no step may be planned before those in flight are over, as the host drafts
    for one of them or for the next one.
    """
    how = config.speculation
    if how is None or how.drafter != HOST or not state.inflight:
        return False
    if any(plan.drafts for plan in state.inflight):
        return True
    rows = len(state.running)
    if not state.drafting.proposals or 0 < how.rows < rows:
        return False
    drafters, _ = _bounded(config, state, how, _proposed_for(how, state))
    more = _to_be_filled(state)
    room = config.max_num_batched_tokens - rows - more
    others, prompts = rows + more - len(drafters), more > 0
    return any(_numbers(how, state, drafters, others, room, prompts))


def plan_drafts(work: Work) -> None:
    """Give drafts to rows of the step, beside what it has already."""
    how = work.config.speculation
    if how is None:
        return
    drafters = [*_drafters(work, how)]
    if how.drafter == HOST and work.state.drafting.proposals:
        work.state = _all_used(work.state)
    if not drafters or work.room <= 0:
        return
    drafters, work.state = _bounded(work.config, work.state, how, drafters)
    inputs = len(work.state.running) - len(work.idle) + sum(work.shares.values())
    inputs -= len(work.shares)
    others, prompts = inputs - len(drafters), bool(work.shares)
    numbers = _numbers(how, work.state, drafters, others, work.room, prompts)
    each = zip(drafters, numbers, strict=True)
    _give(work, [evolve(one, most=number) for one, number in each if number])


def _drafters(work: Work, how: Speculation) -> Iterator[Drafter]:
    """Who takes part in the step, decodes, and may have drafts."""
    run = work.state.running
    if 0 < how.rows < len(run) - len(work.idle):
        return
    if how.drafter == HOST and work.state.inflight:
        return
    some = _proposed_for(how, work.state) if how.drafter == HOST else _all(how, work)
    for one in some:
        gen = run.gens[one.i]
        if gen not in work.idle and gen not in work.shares:
            yield one


def _all(how: Speculation, work: Work) -> Iterator[Drafter]:
    run = work.state.running
    for i, seq in enumerate(run.seqs):
        most = min(how.drafts, run.last[i] - run.sched[i] - 1)
        if most > 0 and may_draft(seq.request, how.drafter):
            yield Drafter(i, most)


def _proposed_for(how: Speculation, state: EngineState) -> Iterator[Drafter]:
    """Who would have drafts of the host, if nothing were in flight."""
    run, proposals = state.running, state.drafting.proposals
    for i, name in enumerate(run.ids):
        found = proposals.get(name)
        if (
            found is None
            or found.known != run.known[i]
            or name in state.paused
            or not may_draft(run.seqs[i].request, HOST)
        ):
            continue
        most = min(how.drafts, len(found.tokens), run.last[i] - run.known[i])
        if most > 0:
            yield Drafter(i, most, found.tokens)


def _bounded(
    config: EngineConfig,
    state: EngineState,
    how: Speculation,
    drafters: Iterable[Drafter],
) -> tuple[list[Drafter], EngineState]:
    """Drafters, with as many drafts as the policy allows, which is asked if there are
    any.
    """
    some = [*drafters]
    if not some:
        return some, state
    most, state = consult.drafts(config, state, load(config, state), how.drafts)
    return [evolve(one, most=min(one.most, most)) for one in some], state


def _to_be_filled(state: EngineState) -> int:
    """Inputs of prompts that rows still have to take, besides one of each."""
    run = state.running
    if not state.filling:
        return 0
    each = zip(run.base, run.sched, strict=True)
    return sum(max(0, base - sched - 1) for base, sched in each)


def _numbers(
    how: Speculation,
    state: EngineState,
    drafters: list[Drafter],
    others: int,
    room: int,
    prompts: bool,
) -> tuple[int, ...]:
    """How many drafts each has, at most `room` together, beside `others` inputs, some of
    which may be of `prompts`.
    """
    if how.adaptive and how.costs is not None:
        names, step = state.running.ids, state.next_step
        rows = [
            Row(state.drafting.likelihood(how.learning, names[one.i], step), one.most)
            for one in drafters
        ]
        found = lengths(rows, how.costs, others, how.margin, room, prompts=prompts)
        return found.drafts
    return _fitting(tuple(_as_they_come((one.most for one in drafters), room)), room)


def _as_they_come(wanted: Iterable[int], room: int) -> Iterator[int]:
    for want in wanted:
        number = max(0, min(want, room))
        room -= number
        yield number


def _fitting(drafts: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Drafts, at most `room` together, cut to what there is room for if each row that has
    some takes as much of it as the deepest.
    """
    each = max(0, room) // max(1, sum(map(bool, drafts)))
    return tuple(min(one, each) for one in drafts)


def _all_used(state: EngineState) -> EngineState:
    """Proposals are for one step: none is left."""
    drafting = state.drafting
    return evolve(state, drafting=evolve(drafting, proposals=Map()))


def _give(work: Work, drafters: list[Drafter]) -> None:
    """Lay down who has how many drafts, as far as its table goes."""
    run = work.state.running
    upto = {one.i: run.sched[one.i] + one.most + 1 for one in drafters}
    work.state, work.grown = make_room(work.config, work.state, upto, work.grown)
    run = work.state.running
    most = dict[int, int]()
    for one in drafters:
        entries = len(run.tables[one.i]) * work.config.block_size
        number = min(one.most, entries - run.sched[one.i] - 1)
        if number > 0:
            most[one.i] = 1 + number
            work.drafts[run.gens[one.i]] = one.tokens[:number]
    if most:
        work.most = edited_column(ones(len(run)), most)
