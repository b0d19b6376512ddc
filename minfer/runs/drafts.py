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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import frozen

from minfer.messages import Event, Executed, Failed, OfSample, Voided
from minfer.plan import Plan, Yields
from minfer.sequence import Running, SampleIds
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
class Drafted:
    """The drafts of one step, as columns."""

    step: int
    ids: SampleIds
    known: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


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


def drafted(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[Drafted, ...]:
    """What a turn says of drafts, step by step: what a live engine has time for."""
    if not any(plan.drafts for plan in before.inflight):
        return ()  # the usual case first: it costs nothing
    found, come = list[Drafted](), Counter[int]()
    for one in good_steps(before, events, transition):
        sizes = tuple(map(len, one.yields))
        if one.plan.drafts:
            found.append(_columns(before.running, one.plan, sizes, come))
        come.update(dict(zip(one.plan.gens, sizes, strict=True)))
    return tuple(found)


def _columns(
    run: Running, plan: Plan, sizes: tuple[int, ...], come: Mapping[int, int]
) -> Drafted:
    """The drafts of a step, whose rows yielded so many tokens; `come` have come in this
    turn before, by generation.
    """
    rows: Sequence[int] = [draft.index for draft in plan.drafts]
    seats = rows
    if plan.gens != run.gens:  # sequences came or went since this was planned
        place = {gen: i for i, gen in enumerate(run.gens)}
        rows = [at for at in rows if plan.gens[at] in place]
        seats = [place[plan.gens[at]] for at in rows]
    return Drafted(
        step=plan.step,
        ids=tuple([run.ids[i] for i in seats]),
        known=tuple([run.known[i] + come.get(run.gens[i], 0) for i in seats]),
        proposed=tuple([plan.counts[at] - 1 for at in rows]),
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


def tally_of(some: Iterable[Judged]) -> Tally:
    """Their counts, together."""
    tally = Tally()
    for one in some:
        tally = tally.plus(of_row(one.proposed, one.accepted))
    return tally
