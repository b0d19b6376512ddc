"""What became of a step's drafts is remembered, of each sample and of all together."""

from minfer.plan import Plan
from minfer.record import evolve
from minfer.speculate.drafting import Drafting, Learnt
from minfer.speculate.length import Learning, judged
from minfer.state import EngineState


def learnt(
    how: Learning, state: EngineState, plan: Plan, sizes: tuple[int, ...]
) -> EngineState:
    """The state after a step with drafts, whose rows yielded so many tokens."""
    run = state.running
    names = dict(zip(run.gens, run.ids, strict=True))
    drafting, records = state.drafting, state.drafting.learnt.mutate()
    tried = right = 0
    for draft in plan.drafts:
        name = names.get(plan.gens[draft.index])
        if name is None:  # it has gone, and its results do not count
            continue
        accepted = sizes[draft.index] - 1
        count = judged(plan.counts[draft.index] - 1, accepted)
        tried, right = tried + count, right + accepted
        before = records.get(name, Learnt(step=plan.step)).by(how, plan.step)
        records[name] = Learnt(before.told(how, count, accepted), plan.step)
    overall = drafting.overall.by(how, plan.step).told(how, tried, right)
    drafting = Drafting(drafting.proposals, records.finish(), Learnt(overall, plan.step))
    return evolve(state, drafting=drafting)
