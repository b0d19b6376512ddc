"""What became of drafts: a fold over turns.

Theory. A step's plan says which rows had drafts and how many; its results say how many
tokens each row has. Of these the last is the target's own, those before it are drafts
that stood. Nothing else has to be written down: what became of every draft is in any
journal, also in one without token ids.

A row whose sample had left before the turn in which its step ended (it ended with the
step before, gave way, or was cancelled) yields tokens for nobody: its drafts are in no
count. Nor are those of steps that failed. Of a sample that ends within its drafts, those
that stood behind its end are counted: the model agreed with them.
"""

from collections.abc import Iterable, Iterator

from attrs import frozen

from minfer.messages import Event, Executed, Failed, OfSample, Voided
from minfer.plan import Plan, Yields
from minfer.speculate.tally import Tally, of_row
from minfer.state import EngineState, Transition


@frozen
class Judged(OfSample):
    """The drafts of one sample in one step."""

    step: int
    known: int  # tokens that it had before: the first draft was for the next
    proposed: int
    accepted: int


@frozen
class Good:
    """A step that ended well."""

    plan: Plan
    yields: Yields


def good_steps(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> Iterator[Good]:
    """The steps that ended well in a turn, in their order."""
    flying = list(before.inflight)
    void = {one.step for one in transition.reasons if isinstance(one, Voided)}
    for event in events:
        if not isinstance(event, Executed | Failed) or not flying:
            continue
        if event.step in {plan.step for plan in flying} & void:
            flying.clear()
        elif isinstance(event, Executed) and event.step == flying[0].step:
            yield Good(flying.pop(0), event.yields)


def judged(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[Judged, ...]:
    """What a turn says of drafts, by sample, in the order of the batch."""
    if not any(plan.drafts for plan in before.inflight):
        return ()  # the usual case first: it costs nothing
    run, found = before.running, list[Judged]()
    known = dict(zip(run.gens, run.known, strict=True))
    names = dict(zip(run.gens, run.ids, strict=True))
    for one in good_steps(before, events, transition):
        plan, sizes = one.plan, tuple(map(len, one.yields))
        for draft in plan.drafts:
            at = draft.index
            gen = plan.gens[at]
            if gen in names:
                count, right = plan.counts[at] - 1, sizes[at] - 1
                told = Judged(*names[gen], plan.step, known[gen], count, right)
                found.append(told)
        for gen, size in zip(plan.gens, sizes, strict=True):
            known[gen] = known.get(gen, 0) + size
    return tuple(found)


def tally_of(some: Iterable[Judged]) -> Tally:
    """Their counts, together."""
    tally = Tally()
    for one in some:
        tally = tally.plus(of_row(one.proposed, one.accepted))
    return tally
