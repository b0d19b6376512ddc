"""Samples for which the host is not ready: what they wait for must not hold up others.

Theory. Who is bound to the host is sampled by a mask that the host makes. Where that
takes long, its row would keep a whole step waiting; so the host says `Pause`, and the row
sits out every step until the same is said with `paused` false. Only what yields needs a
mask: a paused sample is filled like any other, up to its last input, which would yield.
So a prompt is computed while its first mask is made, and samples that wait for the KV of
a paused sibling get it.

In line a paused sample is like any other, too. It is let in when it is its turn, so that
nobody behind it has to wait for its mask; with nothing to be filled it takes its seat and
sits there. It then copies no tail of a sibling, as copies go with the plan that opens a
row: it computes the tail itself. It holds its row and blocks, as running samples do, and
gives them up like them, if a policy says so.

Who has to run alone, as steps of it failed, would let nobody run while it is paused. So
such a sample is not planned at all until it goes on, and the others are. They may take
its seat from it meanwhile: when it comes back it sits a step out, and then runs alone.
"""

from collections.abc import Sequence

from minfer.config import EngineConfig
from minfer.messages import Ignored, Pause, Reason, clip
from minfer.record import evolve
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition


def told_of_pauses(state: EngineState, pauses: Sequence[Pause]) -> Transition:
    """Remember for which samples the host is not ready: of those that have not ended and
    are bound to it.
    """
    paused, reasons = set(state.paused), list[Reason]()
    names = {(pause.id, pause.sample) for pause in pauses}
    run = state.running
    known = {run.ids[i]: run.seqs[i] for i in _places(run.ids, names)}
    for pause in pauses:
        name = pause.id, pause.sample
        live = state.requests.get(pause.id)
        seq = known.get(name)
        if seq is None and live is not None:
            seq = state.waiting.find(live.place_of(pause.sample))
        if seq is None or not seq.request.lockstep:
            who = f"sample {pause.sample} of {clip(repr(pause.id))}"
            reasons.append(Ignored("pause", f"{who} waits for no mask here"))
        elif pause.paused:
            paused.add(name)
        else:
            paused.discard(name)
    if paused != state.paused:
        state = evolve(state, paused=frozenset(paused))
    return Transition(state, (), tuple(reasons))


def _places(
    ids: tuple[SampleId, ...], names: set[SampleId] | frozenset[SampleId]
) -> list[int]:
    return [i for i, name in enumerate(ids) if name in names]


def accused(config: EngineConfig, state: EngineState) -> list[SampleId]:
    """Whose next failure could end it: each has to run alone, so that it does not end for
    a neighbour's fault.
    """
    few = min(2, config.max_failures - 1)
    return [sample for sample, count in state.faults if count >= few]


def resting(config: EngineConfig, state: EngineState) -> list[int]:
    """The generations of paused samples of which nothing is to be filled but the last
    input, and of those that would have to run alone.
    """
    run = state.running
    alone = accused(config, state) if state.faults else ()
    return [
        run.gens[i]
        for i in _places(run.ids, state.paused)
        if run.sched[i] + 1 >= run.base[i] or run.ids[i] in alone
    ]


def all_rest(config: EngineConfig, state: EngineState) -> bool:
    """Whether somebody is paused, and everybody who runs rests."""
    run, paused = state.running, state.paused
    enough = bool(paused) and len(paused) >= len(run)  # others wait in line
    return enough and len(resting(config, state)) == len(run)


def sits(config: EngineConfig, state: EngineState, name: SampleId) -> bool:
    """Whether a newcomer only takes its seat by the plan that is being made: if it has to
    run alone.
    """
    return name in accused(config, state)
