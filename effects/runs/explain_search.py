"""A beam search in a journal: its rounds together, as the one request of the client.

A fold over turns. The parts of a round add up to its time: that until its last beam was
admitted, and the rest, in which its step ran. A beam is a request of its own, which
`minfer explain` explains by its id.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from attrs import asdict, define

from minfer.effects.live.beams.beam_rounds import replayed
from minfer.records.messages import Admitted, Emit, Submit
from minfer.records.state import Turn
from minfer.sampling.beam import BeamRound

SHOWN: Final = 5  # the slowest rounds, which are shown
_HEAD: Final = (
    "Beam search {id!r}: {prompt:,} prompt tokens, {width} beams, {most:,} tokens to "
    "come at most"
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
    kept = list[Turn]()
    about: BeamRound | None = None
    rounds, numbers = dict[int, RoundTimes](), dict[str, int]()
    for turn in turns:
        now, came = turn.transition.state.time, False
        for event in turn.events:
            search = (
                event.request.continuation.beam_round
                if isinstance(event, Submit)
                else None
            )
            if isinstance(event, Submit) and search is not None and search.id == name:
                if not search.number and rounds:  # another search begins
                    about = None
                    kept, rounds, numbers = [], {}, {}
                about, came = about or search, True
                numbers[event.request.id] = search.number
                rounds.setdefault(
                    search.number, RoundTimes(search.number, turn.number, now)
                )
        ended = _note_beams(turn, now, rounds, numbers)
        if ended or came:
            kept.append(turn)
    found = replayed(kept).get(name)
    figures = {} if about is None else {"width": about.width, "most": about.most}
    return {
        "id": name,
        "prompt": 0 if about is None else about.prompt,
        **figures,
        "rounds": [asdict(one) for one in rounds.values()],
        "over": found is not None and found.over,
        "found": [asdict(one) for one in found.done] if found is not None else [],
    }


def _note_beams(
    turn: Turn, now: float, rounds: dict[int, RoundTimes], numbers: dict[str, int]
) -> bool:
    """Note the beams that a turn admitted and ended; whether it ended any."""
    for reason in turn.transition.reasons:
        if isinstance(reason, Admitted) and reason.id in numbers:
            one = rounds[numbers[reason.id]]
            one.admitted = now
            one.beams += 1
            one.known += reason.known
            one.hit += reason.hit
            one.copied += reason.copied
    ends = [
        done
        for command in turn.transition.commands
        if isinstance(command, Emit)
        for done in command.finished
        if done.id in numbers
    ]
    for done in ends:
        rounds[numbers[done.id]].ended = now
    return bool(ends)


def render_search(figures: dict[str, Any]) -> Iterator[str]:
    """The explanation, in plain words."""
    yield _HEAD.format(**figures)
    rounds = figures["rounds"]
    over = [one for one in rounds if one["ended"]]
    sums = {key: sum(one[key] for one in rounds) for key in ("known", "hit", "copied")}
    waited = sum(1000 * (one["admitted"] - one["arrived"]) for one in over)
    seconds = sum(1000 * (one["ended"] - one["arrived"]) for one in over)
    yield _ROUNDS.format(count=len(rounds), seconds=seconds, waited=waited, **sums)
    longest = sorted(over, key=lambda one: one["arrived"] - one["ended"])[:SHOWN]
    for one in sorted(longest, key=lambda one: int(one["number"])):
        ms = 1000 * (one["ended"] - one["arrived"])
        wait = 1000 * (one["admitted"] - one["arrived"])
        yield _ROUND.format(ms=ms, wait=wait, **one)
    for place, one in enumerate(figures["found"], 1):
        yield _FOUND.format(place=place, **{**one, "tokens": len(one["tokens"])})
    if not figures["over"]:
        yield "  it did not end here"
