"""A beam search in a journal: its rounds together, as the one request of the client.

A fold over turns. The parts of a round add up to its time: that until its last beam was
admitted, and the rest, in which its step ran. A beam is a request of its own, which
`minfer explain` explains by its id.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from attrs import asdict, define

from minfer.effects.live.beams.beam_rounds import replay_searches
from minfer.records.messages import Admitted, Emit, Submit
from minfer.records.state import Turn
from minfer.sampling.beam import BeamRound

MAX_ROUNDS_SHOWN: Final = 5  # the slowest rounds, which are shown
_HEAD: Final = (
    "Beam search {id!r}: {prompt:,} prompt tokens, {width} beams, at most {most:,} "
    "output tokens"
)
_ROUNDS: Final = (
    "  {count:,} rounds in {seconds:,.1f} ms, of which beams waited {waited:,.1f} ms to "
    "be admitted; of {known:,} tokens {hit:,} were cached, {copied:,} copied"
)
_ROUND: Final = (
    "  round {number:,}, turn {turn:,}: {ms:,.1f} ms, {wait:,.1f} ms of them waiting; "
    "{beams} beams of {known:,} tokens, {hit:,} cached, {copied:,} copied"
)
_FOUND: Final = "  {place}. {tokens:,} tokens, log-probability {logprob:.4f}: {reason!r}"


@define
class RoundTimes:
    """The times of a round, in seconds, and its lengths in tokens of all its beams."""

    number: int
    turn: int  # in which it came
    arrived: float
    admitted: float = 0.0  # the last of its beams
    ended: float = 0.0  # likewise
    beams: int = 0
    known: int = 0
    hit: int = 0
    copied: int = 0


def search_figures(turns: Iterable[Turn], name: str) -> dict[str, Any]:
    """The rounds and results of the search `name`, as JSON values; of several with this
    id one after another, of the last.
    """
    beam_turns = list[Turn]()
    first_round: BeamRound | None = None
    rounds, numbers = dict[int, RoundTimes](), dict[str, int]()
    for turn in turns:
        now, submitted = turn.transition.state.time, False
        for event in turn.events:
            search = (
                event.request.continuation.beam_round
                if isinstance(event, Submit)
                else None
            )
            if isinstance(event, Submit) and search is not None and search.id == name:
                if not search.number and rounds:  # another search begins
                    first_round = None
                    beam_turns, rounds, numbers = [], {}, {}
                first_round, submitted = first_round or search, True
                numbers[event.request.id] = search.number
                rounds.setdefault(
                    search.number, RoundTimes(search.number, turn.number, now)
                )
        ended = _note_beams(turn, now, rounds, numbers)
        if ended or submitted:
            beam_turns.append(turn)
    replayed_search = replay_searches(beam_turns).get(name)
    figures = (
        {}
        if first_round is None
        else {"width": first_round.width, "most": first_round.most}
    )
    return {
        "id": name,
        "prompt": 0 if first_round is None else first_round.prompt,
        **figures,
        "rounds": [asdict(times) for times in rounds.values()],
        "over": replayed_search is not None and replayed_search.is_finished,
        "found": [asdict(beam) for beam in replayed_search.done]
        if replayed_search is not None
        else [],
    }


def _note_beams(
    turn: Turn, now: float, rounds: dict[int, RoundTimes], numbers: dict[str, int]
) -> bool:
    """Note the beams that a turn admitted and ended; whether it ended any."""
    for reason in turn.transition.reasons:
        if isinstance(reason, Admitted) and reason.id in numbers:
            round_times = rounds[numbers[reason.id]]
            round_times.admitted = now
            round_times.beams += 1
            round_times.known += reason.known
            round_times.hit += reason.hit
            round_times.copied += reason.copied
    ends = [
        end
        for command in turn.transition.commands
        if isinstance(command, Emit)
        for end in command.finished
        if end.id in numbers
    ]
    for end in ends:
        rounds[numbers[end.id]].ended = now
    return bool(ends)


def render_search(figures: dict[str, Any]) -> Iterator[str]:
    """The explanation, in plain words."""
    yield _HEAD.format(**figures)
    rounds = figures["rounds"]
    ended = [beam_round for beam_round in rounds if beam_round["ended"]]
    sums = {
        key: sum(beam_round[key] for beam_round in rounds)
        for key in ("known", "hit", "copied")
    }
    waited = sum(
        1000 * (beam_round["admitted"] - beam_round["arrived"]) for beam_round in ended
    )
    seconds = sum(
        1000 * (beam_round["ended"] - beam_round["arrived"]) for beam_round in ended
    )
    yield _ROUNDS.format(count=len(rounds), seconds=seconds, waited=waited, **sums)
    longest = sorted(
        ended, key=lambda beam_round: beam_round["arrived"] - beam_round["ended"]
    )[:MAX_ROUNDS_SHOWN]
    for beam_round in sorted(longest, key=lambda beam_round: int(beam_round["number"])):
        ms = 1000 * (beam_round["ended"] - beam_round["arrived"])
        wait = 1000 * (beam_round["admitted"] - beam_round["arrived"])
        yield _ROUND.format(ms=ms, wait=wait, **beam_round)
    for place, beam in enumerate(figures["found"], 1):
        yield _FOUND.format(place=place, **{**beam, "tokens": len(beam["tokens"])})
    if not figures["over"]:
        yield "  it did not end here"
