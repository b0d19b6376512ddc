"""Ends samples, waiting or running, as the table of transitions has it: a sample that ran
leaves blocks, which may stay behind a fence; one that waited leaves the queue alone.
"""

from collections.abc import Iterable
from functools import reduce

from attrs import frozen

from minfer.lifecycle.retire import retire
from minfer.lifecycle.transitions import Cause, Stage, move, waiting_stage
from minfer.policies import consult
from minfer.records.config import EngineConfig
from minfer.records.drafting import NOTHING_DRAFTED, Drafting
from minfer.records.messages import Finished
from minfer.records.sequence import Place, Running, SampleId, Sequence
from minfer.records.state import EngineState
from minfer.values.record import evolve


@frozen
class EndingSample:
    """A sample to be ended, with its position."""

    seq: Sequence
    known: int  # tokens, up to its end
    cause: Cause
    reason: str
    error: str = ""
    at: int | None = None  # position among the running, if it runs

    @property
    def target(self) -> Stage:
        """The stage to which its end moves it."""
        runs = self.at is not None
        return move(Stage.RUNNING if runs else waiting_stage(self.seq), self.cause)


def ending_sample(
    running: Running, i: int, cause: Cause, reason: str, error: str = ""
) -> EndingSample:
    """The running sample at `i`, to be ended with all its known tokens."""
    return EndingSample(running.seqs[i], running.known[i], cause, reason, error, i)


def end_samples(
    config: EngineConfig, state: EngineState, leavers: Iterable[EndingSample]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End samples, waiting or running, in this order; the blocks of running ones stay
    cached.

    The queue, the columns and the requests are rebuilt once for all of them.
    """
    leavers = tuple(leavers)
    state, finished = _count_ended(config, state, leavers)
    waiting, running = list[Place](), list[int]()
    for leaver in leavers:
        if leaver.target is Stage.FENCED and leaver.at is not None:
            running.append(leaver.at)
        else:
            waiting.append(leaver.seq.place)
    if waiting:
        state = evolve(state, waiting=state.waiting.remove_many(waiting))
    return retire(config, state, running), finished


def _count_ended(
    config: EngineConfig, state: EngineState, leavers: Iterable[EndingSample]
) -> tuple[EngineState, tuple[Finished, ...]]:
    """Count samples as ended; a request is removed with its last one."""
    requests, finished, ended = state.requests.mutate(), list[Finished](), set[SampleId]()
    for leaver in leavers:
        seq, request = leaver.seq, leaver.seq.request
        live, output = requests[request.id], leaver.known - len(request.prompt)
        if live.ended + 1 == live.samples:
            del requests[request.id]
        else:
            requests[request.id] = evolve(live, ended=live.ended + 1)
        ran = leaver.at is not None or seq.preempted > 0
        state = consult.ended(config, state, request, output, ran=ran)
        finished.append(
            Finished(*seq.id, leaver.reason, output, leaver.error, seq.cached)
        )
        ended.add(seq.id)
    faults = tuple(fault for fault in state.faults if fault[0] not in ended)
    if state.paused:
        state = evolve(state, paused=state.paused - ended)
    if state.drafting is not NOTHING_DRAFTED:
        state = evolve(state, drafting=reduce(Drafting.without, ended, state.drafting))
    tiers = state.tiers.without({name for name, _ in ended}) if ended else state.tiers
    state = evolve(state, requests=requests.finish(), faults=faults, tiers=tiers)
    return state, tuple(finished)
