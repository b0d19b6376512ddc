"""Records the acceptance of a step's drafts: of all samples together, and of each if the
number of its drafts depends on it.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from minfer.records.acceptance import counted_drafts
from minfer.records.drafting import Drafting, SampleAcceptance
from minfer.records.plan import Plan
from minfer.records.speculation import Speculation
from minfer.records.state import EngineState
from minfer.values.record import evolve

_index: Final = attrgetter("index")


def update_acceptance(
    how: Speculation, state: EngineState, plan: Plan, sizes: tuple[int, ...]
) -> EngineState:
    """The state after a step with drafts, whose rows yielded these numbers of tokens."""
    run, places = state.running, [*map(_index, plan.drafts)]
    if plan.run_ids != run.run_ids:  # results of sequences that left do not count
        here = frozenset(run.run_ids)
        places = [at for at in places if plan.run_ids[at] in here]
    accepted = [sizes[at] - 1 for at in places]
    counts = [
        counted_drafts(plan.num_scheduled_tokens[at] - 1, sizes[at] - 1) for at in places
    ]
    drafting, learning = state.drafting, how.learning
    before = drafting.overall.by(learning, plan.step)
    overall = before.updated(learning, sum(counts), sum(accepted))
    if how.adaptive:
        drafting = _update_samples(how, state, plan, places, counts, accepted)
    drafting = evolve(drafting, overall=SampleAcceptance(overall, plan.step))
    return evolve(state, drafting=drafting)


def _update_samples(
    how: Speculation,
    state: EngineState,
    plan: Plan,
    places: Sequence[int],
    counts: Sequence[int],
    accepted: Sequence[int],
) -> Drafting:
    """The state with the records of the samples in these rows of the plan."""
    run, learning, step = state.running, how.learning, plan.step
    if plan.run_ids == run.run_ids:
        names = [*map(run.ids.__getitem__, places)]
    else:
        ids = dict(zip(run.run_ids, run.ids, strict=True))
        names = [ids[plan.run_ids[at]] for at in places]
    records = state.drafting.learnt.mutate()
    new, behind = SampleAcceptance(step=step), step - 1
    for name, count, right in zip(names, counts, accepted, strict=True):
        own = records.get(name, new)
        record = own.record if own.step == behind else own.by(learning, step)
        records[name] = SampleAcceptance(record.updated(learning, count, right), step)
    return evolve(state.drafting, learnt=records.finish())
