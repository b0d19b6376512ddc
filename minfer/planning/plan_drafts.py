"""Which rows of a step have drafts, and how many.

Theory. Drafts take what a step has left: tokens of its budget that neither decode rows
nor prefill took, and blocks while there are plenty. So drafts neither delay an admission
nor cause a preemption. `length.py` computes how many are profitable, from recent
acceptance and the cost of verifying; the policy bounds them. A device takes as many
inputs of each row with drafts as the deepest of them has, and that number must fit into
the budget.

A draft model makes its drafts on the device, and steps are planned ahead as without: the
plan need not know how many drafts of the step before were accepted. Drafts of the host
must be in the plan, after known tokens. So a step with drafts of the host is planned when
nothing is in flight, and the next one only after its results: not of other rows either,
as those would then keep the drafting rows out of every second step. That cost is one of
those by which the number of drafts is decided.

A row in lockstep with the host, for example under a grammar, may have the host's drafts
in a plan, as all tokens before them are known. The engine's own host proposes none for
such rows (`minfer.records.plan`). For a draft model's drafts it could make no masks.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import add, attrgetter, eq, gt, sub
from typing import Final

from attrs import frozen

from minfer.lifecycle.seat import table_blocks
from minfer.planning.admit import current_load
from minfer.planning.build_plan import ones
from minfer.planning.grow import grow_for_drafts
from minfer.planning.work import StepBuilder
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.drafting import Proposed
from minfer.records.request import Request
from minfer.records.sequence import edited_column
from minfer.records.speculation import HOST, Speculation
from minfer.records.state import EngineState
from minfer.speculate.length import lengths
from minfer.values.pmap import Map
from minfer.values.record import evolve

_NOT_PROPOSED: Final = Proposed(-1, ())
_known, _tokens = attrgetter("known"), attrgetter("tokens")


@frozen
class Drafters:
    """Running samples that may have drafts, as columns: all drafts of a step are handled
    in a few passes in C.
    """

    at: Sequence[int]  # positions among the running ones, in order
    most: tuple[int, ...]  # drafts
    tokens: Sequence[tuple[int, ...]] = ()  # the host's, if the host drafts

    def __len__(self) -> int:
        return len(self.at)

    def only(self, chosen: Sequence[bool]) -> "Drafters":
        """The chosen ones."""
        if all(chosen):
            return self
        return Drafters(
            tuple(compress(self.at, chosen)),
            tuple(compress(self.most, chosen)),
            tuple(compress(self.tokens, chosen)),
        )

    def with_numbers(self, numbers: tuple[int, ...]) -> "Drafters":
        """The drafters with these numbers of drafts, without those that have none."""
        return Drafters(self.at, numbers, self.tokens).only(tuple(map(bool, numbers)))


_NO_DRAFTERS: Final = Drafters((), ())


def may_draft(request: Request, drafter: str) -> bool:
    """Whether drafts can be made for a request: not if it yields no token; nor by a draft
    model if it is in lockstep with the host, which has to know the drafts.
    """
    bound = request.needs_host_mask and drafter != HOST
    return not bound and request.prompt_only is None


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


def plan_drafts(work: StepBuilder) -> None:
    """Add drafts to the decode rows of the step, in the budget that is left."""
    how = work.config.speculation
    if how is None:
        return
    drafters = _drafters(work, how)
    if how.drafter == HOST and work.state.drafting.proposals:
        work.state = _drop_proposals(work.state)
    if not drafters or work.room <= 0:
        return
    drafters, work.state = _bounded(work.config, work.state, how, drafters)
    inputs = len(work.state.running) - len(work.skipped) + sum(work.shares.values())
    inputs -= len(work.shares)
    others, prompts = inputs - len(drafters), bool(work.shares)
    numbers = _numbers(how, work.state, drafters, others, work.room, prompts)
    _assign(work, drafters.with_numbers(numbers))


def _drafters(work: StepBuilder, how: Speculation) -> Drafters:
    """The decode rows of the step that may have drafts."""
    run = work.state.running
    if 0 < how.rows < len(run) - len(work.skipped):
        return _NO_DRAFTERS
    if how.drafter == HOST and work.state.inflight:
        return _NO_DRAFTERS
    some = _proposed_for if how.drafter == HOST else _candidates
    found = some(how, work.state)
    out = work.skipped.union(work.shares)
    if not out:
        return found
    return found.only([run.run_ids[i] not in out for i in found.at])


def _candidates(how: Speculation, state: EngineState) -> Drafters:
    """The running samples that could have drafts of a draft model."""
    run = state.running
    left = map(sub, map(sub, run.last_index, run.scheduled), ones(len(run)))
    most = tuple(map(min, left, repeat(how.drafts)))
    chosen = tuple(map(gt, most, repeat(0)))
    # else all are decode rows, and none is in lockstep
    if state.needs_host_mask or state.filling:
        may = (may_draft(seq.request, how.drafter) for seq in run.seqs)
        chosen = tuple([one and other for one, other in zip(chosen, may, strict=True)])
    return Drafters(range(len(run)), most).only(chosen)


def _proposed_for(how: Speculation, state: EngineState) -> Drafters:
    """The samples that would have drafts of the host, if nothing were in flight. Samples
    that yield no token have none: their last token is known.
    """
    run, paused = state.running, state.paused
    proposals = state.drafting.proposals
    found = tuple(map(proposals.get, run.ids, repeat(_NOT_PROPOSED)))
    tokens = tuple(map(_tokens, found))
    left = map(sub, run.last_index, run.known)
    most = tuple(map(min, map(len, tokens), left, repeat(how.drafts)))
    fresh = map(eq, map(_known, found), run.known)
    chosen = tuple(map(gt, map(min, most, fresh), repeat(0)))
    if paused:
        each = zip(chosen, run.ids, strict=True)
        chosen = tuple([one and name not in paused for one, name in each])
    return Drafters(range(len(run)), most, tokens).only(chosen)


def _bounded(
    config: EngineConfig, state: EngineState, how: Speculation, drafters: Drafters
) -> tuple[Drafters, EngineState]:
    """The drafters with at most as many drafts as the policy allows; it is called if
    there are any.
    """
    if not drafters:
        return drafters, state
    most, state = consult.drafts(config, state, current_load(config, state), how.drafts)
    if most < how.drafts:
        fewer = tuple(map(min, drafters.most, repeat(most)))
        drafters = evolve(drafters, most=fewer)
    return drafters, state


def _to_be_filled(state: EngineState) -> int:
    """Prefill tokens that rows still have to take, besides one of each."""
    run = state.running
    if not state.filling:
        return 0
    each = zip(run.num_known_at_admission, run.scheduled, strict=True)
    return sum(max(0, base - scheduled - 1) for base, scheduled in each)


def _numbers(
    how: Speculation,
    state: EngineState,
    drafters: Drafters,
    others: int,
    room: int,
    prompts: bool,
) -> tuple[int, ...]:
    """The number of drafts of each, at most `room` together, beside `others` inputs, some
    of which may be prefill tokens (`prompts`).
    """
    if how.adaptive and how.costs is not None:
        names = map(state.running.ids.__getitem__, drafters.at)
        likely = state.drafting.likelihoods(how.learning, names, state.next_step)
        most, costs = drafters.most, how.costs
        found = lengths(likely, most, costs, others, how.margin, room, prompts=prompts)
        return found.drafts
    if len(drafters) * max(drafters.most, default=0) <= room:
        return drafters.most
    return _fitting(tuple(_in_rank_order(drafters.most, room)), room)


def _in_rank_order(wanted: Iterable[int], room: int) -> Iterator[int]:
    for want in wanted:
        number = max(0, min(want, room))
        room -= number
        yield number


def _fitting(drafts: tuple[int, ...], room: int) -> tuple[int, ...]:
    """The numbers, cut so that they fit into `room` if each row with drafts takes as much
    of it as the deepest.
    """
    each = max(0, room) // max(1, sum(map(bool, drafts)))
    return tuple(min(one, each) for one in drafts)


def _drop_proposals(state: EngineState) -> EngineState:
    """The state without proposals: they are for one step."""
    drafting = state.drafting
    return evolve(state, drafting=evolve(drafting, proposals=Map()))


def _assign(work: StepBuilder, drafters: Drafters) -> None:
    """Add the drafts of each row to the step, as far as its table has room."""
    drafters = _in_tables(work, drafters)
    if not drafters:
        return
    run, at = work.state.running, drafters.at
    gens = map(run.run_ids.__getitem__, at)
    if drafters.tokens:
        each = zip(drafters.tokens, drafters.most, strict=True)
        said = [tokens[:number] for tokens, number in each]
        work.drafts.update(zip(gens, said, strict=True))
    else:
        work.drafts.update(dict.fromkeys(gens, ()))
    ahead = tuple(map(add, drafters.most, ones(len(at))))
    every = len(at) == len(run)
    cells = dict(zip(at, ahead, strict=True))
    work.max_sampled_tokens = ahead if every else edited_column(ones(len(run)), cells)


def _in_tables(work: StepBuilder, drafters: Drafters) -> Drafters:
    """Drafters with as many drafts as their tables have room for. There is room if the
    drafts end before the position at which the table should grow (`grow_at`).
    """
    run, at = work.state.running, drafters.at
    scheduled = tuple(map(run.scheduled.__getitem__, at))
    ends = tuple(map(add, map(add, scheduled, drafters.most), ones(len(at))))
    tight = [*compress(range(len(at)), map(gt, ends, map(run.grow_at.__getitem__, at)))]
    if not tight:
        return drafters
    upto = {at[place]: ends[place] for place in tight}
    work.state, work.grown = grow_for_drafts(work.config, work.state, upto, work.grown)
    tables, size = work.state.running.tables, work.config.block_size
    numbers = list(drafters.most)
    for place in tight:
        room = table_blocks(work.config, tables[at[place]]) * size - scheduled[place] - 1
        numbers[place] = max(0, min(numbers[place], room))
    return drafters.with_numbers(tuple(numbers))
