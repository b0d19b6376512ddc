"""Which rows of a step have drafts, and how many.

Theory. Drafts take what a step has left: tokens of its budget that neither decode rows
nor prefill took, and blocks while there are plenty. So drafts neither delay an admission
nor cause a preemption. `length.py` computes how many are profitable, from recent
acceptance and the cost of verifying; the policy bounds them. A device takes as many
inputs of each row with drafts as the deepest of them has, and that number must fit into
the budget.

A draft model or head makes its drafts on the device, and steps are planned ahead as
without: the plan need not know how many drafts of the step before were accepted. Drafts
of the host must be in the plan, after known tokens. So a step with drafts of the host is
planned when nothing is in flight, and the next one only after its results: not of other
rows either, as those would then keep the drafting rows out of every second step. That
cost is one of those by which the number of drafts is decided.

A row that needs a mask from the host, for example under a grammar, may have the host's
drafts in a plan, as all tokens before them are known. The engine's own host proposes none
for such rows (`minfer.records.plan`). For drafts of the device it could make no masks.
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
from minfer.planning.step_builder import StepBuilder
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
_save_at: Final = attrgetter("states.save_at")


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
    model if it needs masks from the host, which has to know the drafts.
    """
    bound = request.needs_host_mask and drafter != HOST
    return not bound and request.prompt_only is None


def waits_for_results(config: EngineConfig, state: EngineState) -> bool:
    """Whether no step may be planned before those in flight are over, as the host drafts
    for one of them or for the next one.
    """
    spec_config = config.speculation
    if spec_config is None or spec_config.drafter != HOST or not state.inflight:
        return False
    if any(plan.drafts for plan in state.inflight):
        return True
    rows = len(state.running)
    if not state.drafting.proposals or 0 < spec_config.rows < rows:
        return False
    drafters, _ = _bounded(config, state, spec_config, _proposed_for(spec_config, state))
    prefill = _to_be_filled(state)
    room = config.max_num_batched_tokens - rows - prefill
    other_inputs, prompts = rows + prefill - len(drafters), prefill > 0
    return any(_numbers(spec_config, state, drafters, other_inputs, room, prompts))


def plan_drafts(builder: StepBuilder) -> None:
    """Add drafts to the decode rows of the step, in the budget that is left."""
    spec_config = builder.config.speculation
    if spec_config is None:
        return
    drafters = _drafters(builder, spec_config)
    if spec_config.drafter == HOST and builder.state.drafting.proposals:
        builder.state = _drop_proposals(builder.state)
    if not drafters or builder.room <= 0:
        return
    drafters, builder.state = _bounded(
        builder.config, builder.state, spec_config, drafters
    )
    inputs = (
        len(builder.state.running) - len(builder.skipped) + sum(builder.shares.values())
    )
    inputs -= len(builder.shares)
    other_inputs, prompts = inputs - len(drafters), bool(builder.shares)
    numbers = _numbers(
        spec_config, builder.state, drafters, other_inputs, builder.room, prompts
    )
    _assign(builder, drafters.with_numbers(numbers))


def _drafters(builder: StepBuilder, spec_config: Speculation) -> Drafters:
    """The decode rows of the step that may have drafts."""
    run = builder.state.running
    if 0 < spec_config.rows < len(run) - len(builder.skipped):
        return _NO_DRAFTERS
    if spec_config.drafter == HOST and builder.state.inflight:
        return _NO_DRAFTERS
    if spec_config.drafter == HOST:
        drafters = _proposed_for(spec_config, builder.state)
    else:
        drafters = _candidates(builder.config, spec_config, builder.state)
    out = builder.skipped.union(builder.shares)
    if not out:
        return drafters
    return drafters.only([run.run_ids[i] not in out for i in drafters.at])


def _candidates(
    config: EngineConfig, spec_config: Speculation, state: EngineState
) -> Drafters:
    """The running samples that could have drafts of the device."""
    run = state.running
    left: Iterable[int] = map(
        sub, map(sub, run.last_index, run.scheduled), ones(len(run))
    )
    if config.state_group:
        # A state is saved at a position that must be known. Until the results of all
        # plans with drafts have come, `depth` - 1 plans later, `scheduled` is only the
        # furthest possible position. These plans have one input of the row each, and so
        # has the plan that ends at the save: it has no drafts.
        ahead = 1 + config.depth
        save_at = map(_save_at, run.chains)
        left = map(min, left, map(sub, map(sub, save_at, run.scheduled), repeat(ahead)))
    max_drafts = tuple(map(min, left, repeat(spec_config.drafts)))
    chosen = tuple(map(gt, max_drafts, repeat(0)))
    # else all are decode rows, and none needs a mask from the host
    if state.needs_host_mask or state.filling:
        may = (may_draft(seq.request, spec_config.drafter) for seq in run.seqs)
        chosen = tuple(
            [has_room and allowed for has_room, allowed in zip(chosen, may, strict=True)]
        )
    return Drafters(range(len(run)), max_drafts).only(chosen)


def _proposed_for(spec_config: Speculation, state: EngineState) -> Drafters:
    """The samples that would have drafts of the host, if nothing were in flight. Samples
    that yield no token have none: their last token is known.
    """
    run, paused = state.running, state.paused
    proposals = state.drafting.proposals
    proposed = tuple(map(proposals.get, run.ids, repeat(_NOT_PROPOSED)))
    tokens = tuple(map(_tokens, proposed))
    left: Iterable[int] = map(sub, run.last_index, run.known)
    if state.blocks.prefix.state_group:
        # A row without drafts reaches the position at which its state is saved.
        save_at = map(_save_at, run.chains)
        left = map(min, left, map(sub, map(sub, save_at, run.known), ones(len(run))))
    max_drafts = tuple(map(min, map(len, tokens), left, repeat(spec_config.drafts)))
    fresh = map(eq, map(_known, proposed), run.known)
    chosen = tuple(map(gt, map(min, max_drafts, fresh), repeat(0)))
    if paused:
        pairs = zip(chosen, run.ids, strict=True)
        chosen = tuple([is_chosen and name not in paused for is_chosen, name in pairs])
    return Drafters(range(len(run)), max_drafts, tokens).only(chosen)


def _bounded(
    config: EngineConfig, state: EngineState, spec_config: Speculation, drafters: Drafters
) -> tuple[Drafters, EngineState]:
    """The drafters with at most as many drafts as the policy allows; it is called if
    there are any.
    """
    if not drafters:
        return drafters, state
    max_drafts, state = consult.drafts(
        config, state, current_load(config, state), spec_config.drafts
    )
    if max_drafts < spec_config.drafts:
        bounds = tuple(map(min, drafters.most, repeat(max_drafts)))
        drafters = evolve(drafters, most=bounds)
    return drafters, state


def _to_be_filled(state: EngineState) -> int:
    """Prefill tokens that rows still have to take, besides one of each."""
    run = state.running
    if not state.filling:
        return 0
    rows = zip(run.num_known_at_admission, run.scheduled, strict=True)
    return sum(max(0, base - scheduled - 1) for base, scheduled in rows)


def _numbers(
    spec_config: Speculation,
    state: EngineState,
    drafters: Drafters,
    other_inputs: int,
    room: int,
    prompts: bool,
) -> tuple[int, ...]:
    """The number of drafts of each, at most `room` together, beside `other_inputs`, some
    of which may be prefill tokens (`prompts`).
    """
    if spec_config.adaptive and spec_config.costs is not None:
        names = map(state.running.ids.__getitem__, drafters.at)
        likely = state.drafting.likelihoods(spec_config.learning, names, state.next_step)
        max_drafts, costs = drafters.most, spec_config.costs
        chosen = lengths(
            likely,
            max_drafts,
            costs,
            other_inputs,
            spec_config.margin,
            room,
            prompts=prompts,
        )
        return chosen.drafts
    if len(drafters) * max(drafters.most, default=0) <= room:
        return drafters.most
    return _fitting(tuple(_in_rank_order(drafters.most, room)), room)


def _in_rank_order(numbers: Iterable[int], room: int) -> Iterator[int]:
    for number in numbers:
        granted = max(0, min(number, room))
        room -= granted
        yield granted


def _fitting(drafts: tuple[int, ...], room: int) -> tuple[int, ...]:
    """The numbers, cut so that they fit into `room` if each row with drafts takes as much
    of it as the deepest.
    """
    depth = max(0, room) // max(1, sum(map(bool, drafts)))
    return tuple(min(number, depth) for number in drafts)


def _drop_proposals(state: EngineState) -> EngineState:
    """The state without proposals: they are for one step."""
    drafting = state.drafting
    return evolve(state, drafting=evolve(drafting, proposals=Map()))


def _assign(builder: StepBuilder, drafters: Drafters) -> None:
    """Add the drafts of each row to the step, as far as its table has room."""
    drafters = _in_tables(builder, drafters)
    if not drafters:
        return
    run, spots = builder.state.running, drafters.at
    run_ids = map(run.run_ids.__getitem__, spots)
    if drafters.tokens:
        rows = zip(drafters.tokens, drafters.most, strict=True)
        drafts = [tokens[:number] for tokens, number in rows]
        builder.drafts.update(zip(run_ids, drafts, strict=True))
    else:
        builder.drafts.update(dict.fromkeys(run_ids, ()))
    ahead = tuple(map(add, drafters.most, ones(len(spots))))
    all_draft = len(spots) == len(run)
    cells = dict(zip(spots, ahead, strict=True))
    builder.max_sampled_tokens = (
        ahead if all_draft else edited_column(ones(len(run)), cells)
    )


def _in_tables(builder: StepBuilder, drafters: Drafters) -> Drafters:
    """Drafters with as many drafts as their tables have room for. There is room if the
    drafts end before the position at which the table should grow (`grow_at`).
    """
    run, spots = builder.state.running, drafters.at
    scheduled = tuple(map(run.scheduled.__getitem__, spots))
    ends = tuple(map(add, map(add, scheduled, drafters.most), ones(len(spots))))
    tight = [
        *compress(range(len(spots)), map(gt, ends, map(run.grow_at.__getitem__, spots)))
    ]
    if not tight:
        return drafters
    upto = {spots[place]: ends[place] for place in tight}
    builder.state, builder.grown = grow_for_drafts(
        builder.config, builder.state, upto, builder.grown
    )
    tables, size = builder.state.running.tables, builder.config.block_size
    numbers = list(drafters.most)
    for place in tight:
        room = (
            table_blocks(builder.config, tables[spots[place]]) * size
            - scheduled[place]
            - 1
        )
        numbers[place] = max(0, min(numbers[place], room))
    return drafters.with_numbers(tuple(numbers))
