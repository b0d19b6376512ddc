"""Proposed and accepted drafts: a fold over turns.

Theory. A step's plan has the rows with drafts and their numbers; its results have the
number of tokens of each row. The last of these is the target's own, those before it are
accepted drafts. No other record is needed: the acceptance of every draft is in any
journal, also in one without token ids.

A row whose sample had left before the turn in which its step ended (it ended with the
step before, was preempted, or was cancelled) yields tokens that are dropped: its drafts
are not counted. Nor are those of failed steps. If a sample ends within its drafts, the
drafts accepted after its end are counted: the model agreed with them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from minfer.records.messages import Discarded, Event, Executed, Failed, OfSample
from minfer.records.plan import Plan, Yields
from minfer.records.sequence import Running, SampleIds
from minfer.records.state import EngineState, Transition
from minfer.speculate.tally import DraftTally, of_row


@frozen
class Judged(OfSample):
    """The drafts of one sample in one step."""

    step: int
    known: int  # tokens that it had before: the first draft was for the next
    proposed: int
    accepted: int


@frozen
class Drafted:
    """The drafts of one step, as columns."""

    step: int
    ids: SampleIds
    known: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@frozen
class Good:
    """A step with valid results."""

    plan: Plan
    yields: Yields


def good_steps(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> Iterator[Good]:
    """The steps of a turn with valid results, in their order."""
    flying = list(before.inflight)
    discarded = {one.step for one in transition.reasons if isinstance(one, Discarded)}
    for event in events:
        if not isinstance(event, Executed | Failed) or not flying:
            continue
        if event.step in {plan.step for plan in flying} & discarded:
            flying.clear()
        elif isinstance(event, Executed) and event.step == flying[0].step:
            yield Good(flying.pop(0), event.yields)


def drafted(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[Drafted, ...]:
    """The drafts of a turn, step by step: cheap enough for a live engine."""
    if not any(plan.drafts for plan in before.inflight):
        return ()  # the usual case first: it costs nothing
    found, come = list[Drafted](), Counter[int]()
    for one in good_steps(before, events, transition):
        sizes = tuple(map(len, one.yields))
        if one.plan.drafts:
            found.append(_columns(before.running, one.plan, sizes, come))
        come.update(dict(zip(one.plan.run_ids, sizes, strict=True)))
    return tuple(found)


def _columns(
    run: Running, plan: Plan, sizes: tuple[int, ...], come: Mapping[int, int]
) -> Drafted:
    """The drafts of a step, whose rows yielded these numbers of tokens; `come` are the
    tokens of the turn before them, by generation.
    """
    rows: Sequence[int] = [draft.index for draft in plan.drafts]
    seats = rows
    if plan.run_ids != run.run_ids:  # sequences came or went since this was planned
        place = {gen: i for i, gen in enumerate(run.run_ids)}
        rows = [at for at in rows if plan.run_ids[at] in place]
        seats = [place[plan.run_ids[at]] for at in rows]
    return Drafted(
        step=plan.step,
        ids=tuple([run.ids[i] for i in seats]),
        known=tuple([run.known[i] + come.get(run.run_ids[i], 0) for i in seats]),
        proposed=tuple([plan.num_scheduled_tokens[at] - 1 for at in rows]),
        accepted=tuple([sizes[at] - 1 for at in rows]),
    )


def judged(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[Judged, ...]:
    """The same by sample, in the order of the batch."""
    return tuple(
        Judged(*name, one.step, known, proposed, accepted)
        for one in drafted(before, events, transition)
        for name, known, proposed, accepted in zip(
            one.ids, one.known, one.proposed, one.accepted, strict=True
        )
    )


def tally_of(some: Iterable[Judged]) -> DraftTally:
    """The sum of their counts."""
    tally = DraftTally()
    for one in some:
        tally = tally.plus(of_row(one.proposed, one.accepted))
    return tally
