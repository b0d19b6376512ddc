"""Why a request took so long: a fold over turns.

It follows the samples of one request (`minfer.analysis.lives`: where their time went) and
the prefixes that others leave in the cache (`minfer.analysis.prefixes`: what the request
could have hit), and reads no further than the request's end.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from attrs import Factory, define, field, frozen

from minfer.analysis.lives import Followed, Life, Seen
from minfer.analysis.prefixes import Prefix, Prefixes
from minfer.records.config import EngineConfig
from minfer.records.messages import Finished, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn

_LATEST: Final = 10_000  # request ids among which similar ones are searched


class UnknownRequestError(ValueError):
    """A run has no request of that id; the message names similar ones."""


@frozen
class Explanation:
    """Where a request's time went, and why."""

    request: Request
    lives: tuple[Life, ...]
    prefix: Prefix | None  # None: sample 0 was not admitted, or before the run


def explain(config: EngineConfig, turns: Iterable[Turn], name: str) -> Explanation:
    """Explain the first request `name` that was served, or else its last rejection; reads
    no further than its end. Raises UnknownRequestError.
    """
    (found,) = explain_each(config, turns, [name])
    return found


def explain_each(
    config: EngineConfig, turns: Iterable[Turn], names: Sequence[str]
) -> tuple[Explanation, ...]:
    """Explain several requests at once, as `explain`."""
    folds = [_Fold(config, name) for name in names]
    for turn in turns:
        for fold in folds:
            if not fold.served:
                fold.turn(turn)
        if all(fold.served for fold in folds):
            break
    return tuple([_explanation(fold) for fold in folds])


def _explanation(fold: "_Fold") -> Explanation:
    if fold.request is None:
        raise unknown_request(fold.name, [*fold.names])
    lives = tuple(one.life for one in fold.samples.values())
    return Explanation(fold.request, lives, fold.prefixes.found)


def unknown_request(name: str, names: Sequence[str]) -> UnknownRequestError:
    """The error for a request that is none of those with these names."""
    near = ", ".join(get_close_matches(name, names[-_LATEST:], 3, 0.3)) or "none"
    return UnknownRequestError(f"none of {len(names)} requests is {name!r}; near: {near}")


@define(eq=False)
class _Fold:
    """The state of the fold after some turns."""

    config: EngineConfig
    name: str
    prefixes: Prefixes = Factory(
        lambda self: Prefixes(self.config, self.name), takes_self=True
    )
    names: dict[str, None] = field(factory=dict)  # of all requests so far, in order
    request: Request | None = None
    samples: dict[SampleId, Followed] = field(factory=dict)

    @property
    def served(self) -> bool:
        """Whether all samples have ended, and were served."""
        ends = [one.life.end for one in self.samples.values()]
        return bool(ends) and all(end and end.reason != "rejected" for end in ends)

    def turn(self, turn: Turn) -> None:
        """Fold a turn."""
        before, seen = turn.before, Seen.of(turn)
        if before.requests and not self.names:  # the run begins with requests in progress
            self.names = dict.fromkeys(before.requests)
            self._follow(before, turn.number - 1, {})
        for event in turn.events:
            if isinstance(event, Submit):
                self._arrives(event.request, seen)
        for one in self.samples.values():
            if one.life.end is None:
                one.turn(seen)
        self.prefixes.turn(seen)

    def _arrives(self, request: Request, seen: Seen) -> None:
        """Follow a request that arrives, unless one of its id is being followed."""
        self.names[request.id] = None
        over = all(one.life.end for one in self.samples.values())
        if request.id == self.name and over:
            self.request = request
            ends = {end.sample: end for end in seen.ends if end.id == self.name}
            self._follow(seen.turn.transition.state, seen.turn.number, ends)

    def _follow(self, state: EngineState, number: int, ends: dict[int, Finished]) -> None:
        """Follow the samples of the request: those that are served in `state`, after turn
        `number`, and those that ended in that turn.
        """
        served = {s: end for s, end in ends.items() if end.reason != "rejected"}
        if self.name in state.requests or served:
            ends = served  # another one of its id was rejected in the same turn
        self.samples = {}
        for sample, end in ends.items():
            name = self.name, sample
            life = Life(name, state.time, number, state.time, end=end)
            self.samples[name] = Followed(self.config, life)
        known = dict(zip(state.running.ids, state.running.known, strict=True))
        for seq in (*state.waiting, *state.running.seqs):
            if seq.request.id == self.name:
                self.request = seq.request
                tokens = known.get(seq.id, len(seq.history))
                life = Life.found(seq, tokens, state, number)
                self.samples[seq.id] = Followed(self.config, life)
