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
class SampleDrafts(OfSample):
    """The drafts of one sample in one step."""

    step: int
    known: int  # tokens that it had before: the first draft was for the next
    proposed: int
    accepted: int


@frozen
class StepDrafts:
    """The drafts of one step, as columns."""

    step: int
    ids: SampleIds
    known: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


@frozen
class ValidStep:
    """A step with valid results."""

    plan: Plan
    yields: Yields


def valid_steps(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> Iterator[ValidStep]:
    """The steps of a turn with valid results, in their order."""
    in_flight = list(before.inflight)
    discarded = {
        reason.step for reason in transition.reasons if isinstance(reason, Discarded)
    }
    for event in events:
        if not isinstance(event, Executed | Failed) or not in_flight:
            continue
        if event.step in {plan.step for plan in in_flight} & discarded:
            in_flight.clear()
        elif isinstance(event, Executed) and event.step == in_flight[0].step:
            yield ValidStep(in_flight.pop(0), event.yields)


def step_drafts(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[StepDrafts, ...]:
    """The drafts of a turn, step by step: cheap enough for a live engine."""
    if not any(plan.drafts for plan in before.inflight):
        return ()  # the usual case first: it costs nothing
    drafts, num_emitted = list[StepDrafts](), Counter[int]()
    for step in valid_steps(before, events, transition):
        sizes = tuple(map(len, step.yields))
        if step.plan.drafts:
            drafts.append(_columns(before.running, step.plan, sizes, num_emitted))
        num_emitted.update(dict(zip(step.plan.run_ids, sizes, strict=True)))
    return tuple(drafts)


def _columns(
    run: Running, plan: Plan, sizes: tuple[int, ...], num_emitted: Mapping[int, int]
) -> StepDrafts:
    """The drafts of a step, whose rows yielded `sizes` tokens; `num_emitted` are the
    numbers of tokens of the turn's earlier steps, by run id.
    """
    rows: Sequence[int] = [draft.index for draft in plan.drafts]
    indices = rows
    if plan.run_ids != run.run_ids:  # sequences came or went since this was planned
        index_of = {run_id: i for i, run_id in enumerate(run.run_ids)}
        rows = [row for row in rows if plan.run_ids[row] in index_of]
        indices = [index_of[plan.run_ids[row]] for row in rows]
    return StepDrafts(
        step=plan.step,
        ids=tuple([run.ids[i] for i in indices]),
        known=tuple([run.known[i] + num_emitted.get(run.run_ids[i], 0) for i in indices]),
        proposed=tuple([plan.num_scheduled_tokens[row] - 1 for row in rows]),
        accepted=tuple([sizes[row] - 1 for row in rows]),
    )


def sample_drafts(
    before: EngineState, events: Iterable[Event], transition: Transition
) -> tuple[SampleDrafts, ...]:
    """The drafts of a turn by sample, in the order of the batch."""
    return tuple(
        SampleDrafts(*name, step.step, num_known, proposed, accepted)
        for step in step_drafts(before, events, transition)
        for name, num_known, proposed, accepted in zip(
            step.ids, step.known, step.proposed, step.accepted, strict=True
        )
    )


def tally_of(samples: Iterable[SampleDrafts]) -> DraftTally:
    """The sum of the counts of drafts."""
    tally = DraftTally()
    for sample in samples:
        tally = tally.plus(of_row(sample.proposed, sample.accepted))
    return tally
