"""The engine: one pure function from (configuration, state, events) to a transition.

Theory. Everything that happens arrives as an event; everything to be done leaves as a command. A
turn folds the events that have come, in order, and then plans until `depth` steps are in flight or
nothing can run. It looks at no clock, draws no random number, and costs what changed in it.

    Submit ---> waiting line ---> running columns ---> plan ---> executor
                  ^   (admit)        |      ^  (schedule)           |
                  |                  |      |                       |
                  +--- preempted ----+      +------ Executed -------+
                                     |              (commit)
                                     +--> ended: blocks stay cached until space is needed
"""

from minfer import consult
from minfer.blocks import blocks_for
from minfer.commit import over
from minfer.config import EngineConfig
from minfer.keys import extend_keys
from minfer.messages import Cancel, Event, Executed, Failed, Finish, Finished, Submit, Tick, clip
from minfer.record import evolve
from minfer.request import MAX_SAMPLES, Request
from minfer.schedule import schedule
from minfer.sequence import Sequence
from minfer.state import EngineState, Live, Transition, emitted, ignored
from minfer.stop import stopped


def step(config: EngineConfig, state: EngineState, events: tuple[Event, ...]) -> Transition:
    """Take one turn: fold the events, then plan. Total: no event sequence raises."""
    turns: list[Transition] = []
    for together in _in_a_row(events):
        turns.append(_fold(config, state, together))
        state = turns[-1].state
    while len(state.inflight) < config.depth:
        before = state.next_step
        turns.append(schedule(config, state))
        state = turns[-1].state
        if state.next_step == before:
            break
    commands = [command for turn in turns for command in turn.commands]
    reasons = [reason for turn in turns for reason in turn.reasons]
    if state.overruled:
        reasons += state.overruled
        state = evolve(state, overruled=())
    return Transition(state, tuple(commands), tuple(reasons))


def _in_a_row(events: tuple[Event, ...]) -> list[list[Event]]:
    """The events in order, but together what costs less when it is folded at once."""
    found, last = list[list[Event]](), ""
    for event in events:
        kind = "stop" if isinstance(event, Cancel | Finish) else ""
        if kind and kind == last:
            found[-1].append(event)
        else:
            found.append([event])
        last = kind
    return found


def _fold(config: EngineConfig, state: EngineState, events: list[Event]) -> Transition:
    match events[0]:
        case Executed() | Failed() as event:
            return over(config, state, event)
        case Tick(time):
            return Transition(evolve(state, time=max(state.time, time)))
        case Submit(request):
            return _submit(config, state, request)
        case Cancel() | Finish():
            stops = [event for event in events if isinstance(event, Cancel | Finish)]
            return stopped(config, state, stops)
        case _:  # not as typed; but a turn may hold anything
            return ignored(state, type(events[0]).__name__, "it is no event")  # type: ignore[unreachable]


def objection(config: EngineConfig, state: EngineState, request: Request) -> str:
    """Why a request could never run here, or nothing."""
    prompt = len(request.prompt)
    known = prompt + len(request.output)
    most = min(prompt + request.max_tokens, config.max_model_len)
    needs = blocks_for(most, config.block_size)
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
        what = f"prompt and output of up to {most} tokens need {needs} KV blocks"
        return f"{what}; the cache has {config.num_blocks}"
    if len(state.waiting) + request.n > config.max_waiting:
        return f"the waiting line is full ({config.max_waiting} samples)"
    if request.largest >= config.vocab_size:
        return f"token ids must be from 0 to {config.vocab_size - 1}"
    return ""


def _submit(config: EngineConfig, state: EngineState, request: Request) -> Transition:
    if request.id in state.requests:  # its end would be taken for that of the other one
        return ignored(state, "submit", f"{clip(repr(request.id))} is being served")
    why = objection(config, state, request)
    if why:
        samples = range(max(1, min(request.n, MAX_SAMPLES)))
        done = tuple(Finished(request.id, sample, "rejected", 0, why) for sample in samples)
        return emitted(state, done)
    rank, state = consult.rank(config, state, request)
    history = request.prompt + request.output
    given = request.keys[: len(request.prompt) // config.block_size]
    keys = extend_keys(given, request.root, history, config.block_size)
    line, place = state.waiting, (rank, state.arrivals, 0)
    for sample in range(request.n):
        seq = Sequence(request, sample, (*place[:2], sample), state.time, history, keys)
        line = line.insert(seq)
    requests = state.requests.set(request.id, Live(place, request.n))
    arrivals = state.arrivals + 1
    state = evolve(state, waiting=line, arrivals=arrivals, requests=requests)
    return Transition(state)
