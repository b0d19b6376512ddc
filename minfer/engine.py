"""The engine: one pure function from (configuration, state, events) to a transition.

Theory. Everything that happens arrives as an event; everything to be done leaves as a command. A
turn folds the events that have come, in order, and then plans until `depth` steps are in flight or
nothing can run. `step` never raises, whatever the events; it looks at no clock and draws no random
number. A turn's cost is what changed in it.

    Submit ---> waiting line ---> running columns ---> plan ---> executor
                  ^   (admit)        |      ^  (schedule)           |
                  |                  |      |                       |
                  +--- preempted ----+      +------ Executed -------+
                                     |              (commit)
                                     +--> ended: blocks stay cached until space is needed
"""

from minfer.blocks import blocks_for
from minfer.commit import end, ended_reason, executed, failed, one_ended
from minfer.config import EngineConfig
from minfer.keys import extend_keys
from minfer.messages import (
    Cancel,
    Command,
    Emit,
    Event,
    Executed,
    Failed,
    Finish,
    Finished,
    Ignored,
    Reason,
    Submit,
    Tick,
    clip,
)
from minfer.record import evolve
from minfer.request import MAX_SAMPLES, Request
from minfer.schedule import schedule
from minfer.sequence import Sequence
from minfer.state import EngineState, Live, Transition


def step(config: EngineConfig, state: EngineState, events: tuple[Event, ...]) -> Transition:
    """Take one turn: fold the events, then plan. Total: no event sequence raises."""
    commands: list[Command] = []
    reasons: list[Reason] = []
    for event in events:
        turn = _fold(config, state, event)
        state = turn.state
        commands += turn.commands
        reasons += turn.reasons
    while len(state.inflight) < config.depth:
        before = state.next_step
        turn = schedule(config, state)
        state = turn.state
        commands += turn.commands
        reasons += turn.reasons
        if state.next_step == before:
            break
    return Transition(state, tuple(commands), tuple(reasons))


def _fold(config: EngineConfig, state: EngineState, event: Event) -> Transition:
    match event:
        case Executed():
            return executed(config, state, event)
        case Tick(time):
            return Transition(evolve(state, time=max(state.time, time)))
        case Submit(request):
            return _submit(config, state, request)
        case Cancel(name):
            return _cancel(config, state, name)
        case Finish():
            return _finish(config, state, event)
        case Failed():
            return failed(config, state, event)


def objection(config: EngineConfig, state: EngineState, request: Request) -> str:
    """Why a request could never run here, or nothing."""
    prompt = len(request.prompt)
    known = prompt + len(request.output)
    most = min(prompt + request.max_tokens, config.max_model_len)
    needs = blocks_for(most, config.block_size)
    if request.id in state.requests:
        return f"a request with the id {request.id!r} is being served"
    if not prompt:
        return "the prompt is empty"
    if not 1 <= request.n <= MAX_SAMPLES or (request.n > 1 and request.output):
        return f"n must be from 1 to {MAX_SAMPLES}, and 1 for a resumed request"
    if request.max_tokens < 1:
        return "max_tokens must be at least 1"
    if prompt >= config.max_model_len:
        return (
            f"the prompt has {prompt} tokens; this model's maximum context length is "
            f"{config.max_model_len} tokens, of which at least one must be left for the output"
        )
    if known >= most:
        return f"the request was resumed with all of its {most - prompt} output tokens"
    if needs > config.num_blocks:
        return (
            f"prompt and output of up to {most} tokens need {needs} KV blocks; "
            f"the cache has {config.num_blocks}"
        )
    if len(state.waiting) + request.n > config.max_waiting:
        return f"the waiting line is full ({config.max_waiting} samples)"
    if request.largest >= config.vocab_size:
        return f"token ids must be from 0 to {config.vocab_size - 1}"
    return ""


def _submit(config: EngineConfig, state: EngineState, request: Request) -> Transition:
    why = objection(config, state, request)
    if why:
        done = tuple(
            Finished(request.id, sample, "rejected", 0, why)
            for sample in range(max(1, min(request.n, MAX_SAMPLES)))
        )
        return Transition(state, (Emit((), (), done),), tuple(map(ended_reason, done)))
    rank, policy = config.policy.rank(state.policy, request, state.time)
    history = request.prompt + request.output
    given = request.keys[: len(request.prompt) // config.block_size]
    keys = extend_keys(given, request.root, history, config.block_size)
    line = state.waiting
    place = (rank, state.arrivals, 0)
    for sample in range(request.n):
        seq = Sequence(request, sample, (*place[:2], sample), state.time, history, keys)
        line = line.insert(seq)
    return Transition(
        evolve(
            state,
            waiting=line,
            policy=policy,
            arrivals=state.arrivals + 1,
            requests=state.requests.set(request.id, Live(place, request.n)),
        )
    )


def _cancel(config: EngineConfig, state: EngineState, name: str) -> Transition:
    live = state.requests.get(name)
    if live is None:
        return Transition(state, (), (Ignored("cancel", f"no request {clip(repr(name))}"),))
    done: list[Finished] = []
    for sample in range(live.samples):
        state, waited = _leave_line(config, state, name, sample, "cancelled", None)
        done += waited
    owners = enumerate(state.running.ids)
    ended = {i: ("cancelled", "") for i, (owner, _) in owners if owner == name}
    state, ran = end(config, state, ended)
    finished = tuple(sorted((*done, *ran), key=lambda f: f.sample))
    return Transition(state, (Emit((), (), finished),), tuple(map(ended_reason, finished)))


def _finish(config: EngineConfig, state: EngineState, event: Finish) -> Transition:
    state, finished = _leave_line(config, state, event.id, event.sample, event.reason, event.length)
    i = state.running.find((event.id, event.sample))
    if i is not None:
        state, ran = end(config, state, {i: (event.reason, "")})
        finished = tuple(evolve(f, length=_within(event.length, f.length)) for f in ran)
    if not finished:
        what = f"sample {event.sample} of {clip(repr(event.id))} is not being served"
        return Transition(state, (), (Ignored("finish", what),))
    return Transition(state, (Emit((), (), finished),), tuple(map(ended_reason, finished)))


def _within(length: int, most: int) -> int:
    return max(0, min(length, most))


def _leave_line(
    config: EngineConfig,
    state: EngineState,
    name: str,
    sample: int,
    reason: str,
    length: int | None,
) -> tuple[EngineState, tuple[Finished, ...]]:
    """End a sample that waits; nothing happens if it does not."""
    live = state.requests.get(name)
    if live is None:
        return state, ()
    seq = state.waiting.find((live.place[0], live.place[1], sample))
    if seq is None and (name, sample) not in state.running.ids:
        # It has ended, or the policy gave it a better place when it was preempted.
        seq = next((one for one in state.waiting if one.id == (name, sample)), None)
    if seq is None:
        return state, ()
    had = len(seq.history) - len(seq.request.prompt)
    kept = had if length is None else _within(length, had)
    done = Finished(name, sample, reason, kept, "", max(0, live.cached))
    return evolve(
        state,
        waiting=state.waiting.remove(seq.place),
        policy=config.policy.ended(state.policy, seq.request, had, bool(seq.preempted)),
        requests=one_ended(live, name, state.requests),
        faults=tuple(f for f in state.faults if f[0] != (name, sample)),
    ), (done,)
