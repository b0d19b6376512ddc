"""Beams in the engine: what they offer becomes a choice, and a choice becomes forks.

Theory. The beams of a search are the samples of its request, sequences like any other:
they wait in line, share their prompt's blocks, are preempted and come back. Two things
are their own. They are bound to the host: a beam is fed only tokens that were chosen, as
inputs from history. And they go on together: a beam that has offered its candidates sits
still until all have, whoever of them is in line again meanwhile.

Then the choice is made (`minfer.beam`). A beam with children goes on as the first of
them: it knows one token more. A beam without any becomes another's child. It leaves its
seat as one that is retired does, and takes it again as one that is admitted does, as a
new generation with the parent's tokens: it stands on the parent's full blocks, which are
published by then, and computes what is left of them, in blocks of its own. So nothing
that is shared is ever written, and no fork can lack blocks: beams are equally long, so it
gives back as many as it takes. A parent whose blocks are named after a twin's takes its
seat again in the same way.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from minfer.admit import hit_of
from minfer.beam import (
    BeamSearch,
    Candidates,
    Hypothesis,
    Round,
    Search,
    by_seat,
    choose,
    flaw_of,
)
from minfer.blocks import Transaction
from minfer.config import EngineConfig
from minfer.ending import Leaver
from minfer.keys import extend_keys
from minfer.log import Log
from minfer.messages import Forked, Reason
from minfer.plan import Plan
from minfer.publish import sealed
from minfer.record import evolve
from minfer.request import Request
from minfer.retire import Left, give_back, left_by
from minfer.seat import seated
from minfer.sequence import COLUMNS, Chain, Running, Sequence, edited, positions
from minfer.state import EngineState

NOTHING = Hypothesis((), 0.0, 0.0, "length")  # of a search with fewer than beams


def waiting_beams(state: EngineState) -> list[int]:
    """The generations of beams that have made their offer, and wait for others'."""
    run, searches = state.running, state.searches
    return [
        run.gens[i]
        for i, (name, beam) in enumerate(run.ids)
        if name in searches and searches[name].offers[beam] is not None
    ]


def beams_in(state: EngineState, plan: Plan) -> dict[int, int]:
    """The beams that were to make an offer in a plan: place -> position among those who
    run.
    """
    run = state.running
    places = {
        gen: at
        for at, (gen, most) in enumerate(zip(plan.gens, plan.most, strict=True))
        if most
    }
    return {
        places[run.gens[i]]: i
        for i in positions(run, places)
        if run.seqs[i].request.beams is not None
    }


def flaw_in(config: EngineConfig, beams: Mapping[int, int], candidates: Any) -> str:
    """What is wrong with the candidates that came, or nothing; `beams` as `beams_in`
    says.
    """
    if why := flaw_of(candidates, config.vocab_size):
        return why
    if not {one.index for one in candidates}.issuperset(beams):
        return "a beam has offered no candidates"
    return ""


@frozen
class Heard:
    """What comes of what beams offered."""

    state: EngineState
    outputs: dict[int, Hypothesis]  # of searches that are over, by position
    reasons: tuple[Reason, ...]


def searched(
    config: EngineConfig,
    state: EngineState,
    beams: Mapping[int, int],
    candidates: tuple[Candidates, ...],
) -> Heard:
    """Take down what `beams` offer, and go on with the searches that are complete."""
    state, complete = _heard(state, beams, candidates)
    outputs: dict[int, Hypothesis] = {}
    reasons = list[Reason]()
    for name in complete:
        state, out, forked = _decided(config, state, name)
        outputs |= out
        reasons += forked
    return Heard(state, outputs, tuple(reasons))


def found(run: Running, i: int, output: Hypothesis) -> Leaver:
    """The beam at `i`, to end with one of the outputs of its search."""
    seq = run.seqs[i]
    known = len(seq.request.prompt) + len(output.tokens)
    return Leaver(seq, known, output.reason, at=i, logprob=output.logprob)


def _heard(
    state: EngineState, beams: Mapping[int, int], candidates: tuple[Candidates, ...]
) -> tuple[EngineState, list[str]]:
    """Note what beams offer; returns the searches that are complete."""
    searches, names = state.searches.mutate(), dict[str, None]()
    for one in candidates:
        if (i := beams.get(one.index)) is not None:
            name, beam = state.running.ids[i]
            searches[name] = searches[name].with_offer(beam, one)
            names[name] = None
    state = evolve(state, searches=searches.finish(), filling=True)
    return state, [name for name in names if state.searches[name].complete]


@frozen
class Fork:
    """A beam is to become another's child."""

    parent: int  # its position among the running
    token: int


def _decided(
    config: EngineConfig, state: EngineState, name: str
) -> tuple[EngineState, dict[int, Hypothesis], list[Reason]]:
    """Go on with a search all of whose beams have offered: to the next round, or, if it
    is over, with what comes out at each position among those who run.
    """
    run, search = state.running, state.searches[name]
    at = {beam: i for i, (owner, beam) in enumerate(run.ids) if owner == name}
    known = run.known[at[0]]
    request = run.seqs[at[0]].request
    choice = choose(search, _round(config, run, request, at))
    if not choice.children:
        outputs = (*choice.done, *(NOTHING,) * len(at))
        return state, {i: outputs[beam] for beam, i in at.items()}, []
    children = by_seat(choice.children, alike=known == len(request.prompt))
    logprobs = tuple(child.logprob for child in children)
    search = Search(logprobs, (None,) * len(at), choice.done)
    own, forks = dict[int, int](), dict[int, Fork]()
    for beam, child in enumerate(children):
        if child.parent == beam:
            own[at[beam]] = child.token
        else:
            forks[at[beam]] = Fork(at[child.parent], child.token)
    state = evolve(
        state,
        searches=state.searches.set(name, search),
        running=_longer(run, own),
    )
    if not forks:
        return state, {}, []
    state, forked = _forked(config, state, forks, known)
    return state, {}, forked


def _round(
    config: EngineConfig, run: Running, request: Request, at: Mapping[int, int]
) -> Round:
    """What there is to know of a round; `at` is where each beam is among the running."""
    prompt = len(request.prompt)
    return Round(
        how=request.beams or BeamSearch(),
        stop_ids=request.stop_ids,
        length=run.known[at[0]] + 1 - prompt,
        most=request.most_known(config.max_model_len) - prompt,
        output_of=lambda beam: run.tokens(at[beam], config.block_size)[prompt:],
    )


def _longer(run: Running, own: Mapping[int, int]) -> Running:
    """Beams know one token more, which the host is to feed: position -> token."""
    return edited(
        run,
        known={i: run.known[i] + 1 for i in own},
        base={i: run.base[i] + 1 for i in own},
        sched={i: run.sched[i] + 1 for i in own},
        fresh={i: (*run.fresh[i], token) for i, token in own.items()},
    )


def _forked(
    config: EngineConfig, state: EngineState, forks: Mapping[int, Fork], known: int
) -> tuple[EngineState, list[Reason]]:
    """Have the beams at these positions take their seats again as children of others.

    All beams have KV of the first `known` tokens; each parent knows one more already.
    """
    size, full = config.block_size, known // config.block_size
    parents = {fork.parent for fork in forks.values()}
    state = sealed(config, state, dict.fromkeys(parents, full))
    run = state.running
    tokens = {i: run.tokens(i, size) for i in parents}
    # Blocks of the same content were there before a parent's: only who leaves a seat
    # gives its own up for them.
    origins = {i: i for i in parents if run.chains[i].sealed < full}
    histories = {i: tokens[i] for i in origins}
    for i, fork in forks.items():
        origins[i] = fork.parent
        histories[i] = (*tokens[fork.parent][:known], fork.token)
    seqs = {
        i: _as_child(config, run, i, origins[i], history)
        for i, history in histories.items()
    }
    change = Transaction(state.blocks)
    left = [left_by(config, change, run, i, full) for i in seqs]
    state = evolve(state, blocks=change.done())
    state, hits = _seated_again(config, state, seqs, left, known)
    reasons: list[Reason] = [
        Forked(*seq.id, run.seqs[origins[i]].sample, len(seq.history), hits[i] * size)
        for i, seq in seqs.items()
    ]
    return state, reasons


def _seated_again(
    config: EngineConfig,
    state: EngineState,
    seqs: Mapping[int, Sequence],
    left: list[Left],
    known: int,
) -> tuple[EngineState, dict[int, int]]:
    """Seat sequences at their positions, on what is published of the first `known` tokens
    and on blocks of their own; returns how many blocks each hit.

    `left` is what they had before; it is given back once what they share is held.
    """
    size, full = config.block_size, known // config.block_size
    change = Transaction(state.blocks)
    # Tables of those who left their seats say nothing any more.
    bare = evolve(state, running=Running())
    hits = {i: hit_of(config, bare, change, seq.keys, full) for i, seq in seqs.items()}
    for one in left:
        give_back(change, one)
    cells: dict[str, dict[int, Any]] = {name: {} for name in COLUMNS}
    for gen, (i, seq) in enumerate(seqs.items(), state.next_gen):
        hit = hits[i]
        taken = change.take(-(-known // size) - hit.blocks)
        seat = seated(
            config,
            seq,
            gen=gen,
            row=state.running.rows[i],
            # never None: as many were given back
            table=Log(hit.table, taken.blocks if taken else ()),
            chain=Chain(Log(seq.keys), hit.blocks, hit.leaf, low=hit.low),
            start=hit.blocks * size,
        )
        for name, column in cells.items():
            (column[i],) = getattr(seat, name)
    state = evolve(
        state,
        blocks=change.done(),
        running=edited(state.running, **cells),
        next_gen=state.next_gen + len(seqs),
    )
    return state, {i: hit.blocks for i, hit in hits.items()}


def _as_child(
    config: EngineConfig, run: Running, i: int, origin: int, history: tuple[int, ...]
) -> Sequence:
    """The sequence at `i`, as one with the history of a child of the one at `origin`."""
    seq, size = run.seqs[i], config.block_size
    keys = run.chains[origin].keys[:]  # of what all beams have KV of, which is sealed
    return evolve(
        seq,
        history=history,
        keys=extend_keys(keys, seq.request.root, history, size),
    )
