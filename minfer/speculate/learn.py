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
    spec_config: Speculation, state: EngineState, plan: Plan, sizes: tuple[int, ...]
) -> EngineState:
    """The state after a step with drafts, whose rows yielded these numbers of tokens."""
    run, places = state.running, [*map(_index, plan.drafts)]
    if plan.run_ids != run.run_ids:  # results of sequences that left do not count
        present = frozenset(run.run_ids)
        places = [place for place in places if plan.run_ids[place] in present]
    accepted = [sizes[place] - 1 for place in places]
    counts = [
        counted_drafts(plan.num_scheduled_tokens[place] - 1, sizes[place] - 1)
        for place in places
    ]
    drafting, learning = state.drafting, spec_config.learning
    before = drafting.overall.by(learning, plan.step)
    overall = before.updated(learning, sum(counts), sum(accepted))
    if spec_config.adaptive:
        drafting = _update_samples(spec_config, state, plan, places, counts, accepted)
    drafting = evolve(drafting, overall=SampleAcceptance(overall, plan.step))
    return evolve(state, drafting=drafting)


def _update_samples(
    spec_config: Speculation,
    state: EngineState,
    plan: Plan,
    places: Sequence[int],
    counts: Sequence[int],
    accepted: Sequence[int],
) -> Drafting:
    """The state with the records of the samples in these rows of the plan."""
    run, learning, step = state.running, spec_config.learning, plan.step
    if plan.run_ids == run.run_ids:
        names = [*map(run.ids.__getitem__, places)]
    else:
        ids = dict(zip(run.run_ids, run.ids, strict=True))
        names = [ids[plan.run_ids[place]] for place in places]
    records = state.drafting.learnt.mutate()
    unknown, last_step = SampleAcceptance(step=step), step - 1
    for name, count, num_accepted in zip(names, counts, accepted, strict=True):
        sample = records.get(name, unknown)
        record = sample.record if sample.step == last_step else sample.by(learning, step)
        records[name] = SampleAcceptance(
            record.updated(learning, count, num_accepted), step
        )
    return evolve(state.drafting, learnt=records.finish())
