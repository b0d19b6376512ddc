"""Pausing: a sample that waits for the host must not hold up the others.

Theory. A row that needs a mask from the host is sampled once the host has made it. If
that takes long, the whole step would wait for the row; so the host sends `Pause`, and the
row skips every step until a `Pause` with `paused` false. Only sampling needs a mask: a
paused sample is prefilled like any other, up to its last input, which would yield a
token. So a prompt is computed while its first mask is made, and samples that wait for the
KV of a paused sibling get it.

In the queue a paused sample is like any other, too. It is admitted in its turn, so that
no sample behind it waits for its mask; if it needs no prefill it gets a row and skips
steps. It then copies no partial block of a sibling, as copies go with the plan that opens
a row: it recomputes those tokens. It holds its row and blocks, as running samples do, and
is preempted like them, if the policy chooses it.

A paused suspect, which has to run alone, would stop all others. So it is not planned at
all until it continues, and the others are. They may preempt it meanwhile: when it is
admitted again it skips a step, and then runs alone.
"""

from collections.abc import Sequence

from minfer.records.config import EngineConfig
from minfer.records.messages import Ignored, Pause, Reason, clip
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition, waiting_sample
from minfer.values.record import evolve


def apply_pauses(state: EngineState, pauses: Sequence[Pause]) -> Transition:
    """Record for which samples the host is not ready, of those that have not ended and
    need its masks.
    """
    paused, reasons = set(state.paused), list[Reason]()
    names = {(pause.id, pause.sample) for pause in pauses}
    run = state.running
    running = {run.ids[i]: run.seqs[i] for i in _positions(run.ids, names)}
    for pause in pauses:
        name = pause.id, pause.sample
        seq = running.get(name) or waiting_sample(state, name)
        if seq is None or not seq.request.needs_host_mask:
            sample = f"sample {pause.sample} of {clip(repr(pause.id))}"
            reasons.append(Ignored("pause", f"{sample} waits for no mask here"))
        elif pause.paused:
            paused.add(name)
        else:
            paused.discard(name)
    if paused != state.paused:
        state = evolve(state, paused=frozenset(paused))
    return Transition(state, (), tuple(reasons))


def _positions(
    ids: tuple[SampleId, ...], names: set[SampleId] | frozenset[SampleId]
) -> list[int]:
    return [i for i, name in enumerate(ids) if name in names]


def suspects(config: EngineConfig, state: EngineState) -> list[SampleId]:
    """The suspects, whose next failure could end them: each has to run alone, so that it
    does not end by the fault of another sequence.
    """
    min_failures = min(2, config.max_failures - 1)
    return [sample for sample, count in state.faults if count >= min_failures]


def paused_rows(config: EngineConfig, state: EngineState) -> list[int]:
    """The generations of paused samples that need no prefill but the last input, and of
    paused suspects.
    """
    run = state.running
    isolated = suspects(config, state) if state.faults else ()
    return [
        run.run_ids[i]
        for i in _positions(run.ids, state.paused)
        if run.scheduled[i] + 1 >= run.num_known_at_admission[i] or run.ids[i] in isolated
    ]


def all_paused(config: EngineConfig, state: EngineState) -> bool:
    """Whether a sample is paused, and all running ones skip the step as `paused_rows`."""
    run, paused = state.running, state.paused
    enough = bool(paused) and len(paused) >= len(run)  # others are in the queue
    return enough and len(paused_rows(config, state)) == len(run)


def skips_as_suspect(config: EngineConfig, state: EngineState, name: SampleId) -> bool:
    """Whether a newcomer is admitted but skips the step that is being planned: a suspect,
    which has to run alone.
    """
    return name in suspects(config, state)
