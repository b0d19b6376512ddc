"""Why a request took so long: a fold over turns.

It follows the samples of one request (`minfer.analysis.lives`: where their time went) and
the prefixes that others leave in the cache (`minfer.analysis.prefixes`: what the request
could have hit), and reads no further than the request's end.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from attrs import Factory, define, field, frozen

from minfer.analysis.lives import FollowedSample, Life, ParsedTurn
from minfer.analysis.prefixes import PrefixComparison, PrefixTracker
from minfer.journal.overrides import OverrideCounts
from minfer.records.config import EngineConfig
from minfer.records.messages import Finished, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn

_MAX_SEARCHED_IDS: Final = 10_000  # request ids among which similar ones are searched


class UnknownRequestError(ValueError):
    """A run has no request of that id; the message names similar ones."""


@frozen
class Explanation:
    """Where a request's time went, and why."""

    request: Request
    lives: tuple[Life, ...]
    prefix: PrefixComparison | None  # None: sample 0 was not admitted, or before the run
    overrides: OverrideCounts  # of the policy, in the turns that were read


def explain(config: EngineConfig, turns: Iterable[Turn], name: str) -> Explanation:
    """Explain the first request `name` that was served, or else its last rejection; reads
    no further than its end. Raises UnknownRequestError.
    """
    (explanation,) = explain_each(config, turns, [name])
    return explanation


def explain_each(
    config: EngineConfig, turns: Iterable[Turn], names: Sequence[str]
) -> tuple[Explanation, ...]:
    """Explain several requests at once, as `explain`."""
    folds, overrides = [_Fold(config, name) for name in names], OverrideCounts()
    for turn in overrides.fold_turns(turns):
        for fold in folds:
            if not fold.served:
                fold.turn(turn)
        if all(fold.served for fold in folds):
            break
    return tuple([_explanation(fold, overrides) for fold in folds])


def _explanation(fold: "_Fold", overrides: OverrideCounts) -> Explanation:
    if fold.request is None:
        raise unknown_request(fold.name, [*fold.names])
    lives = tuple(sample.life for sample in fold.samples.values())
    return Explanation(fold.request, lives, fold.prefixes.comparison, overrides)


def unknown_request(name: str, names: Sequence[str]) -> UnknownRequestError:
    """The error for a request that is none of those with these names."""
    near = (
        ", ".join(get_close_matches(name, names[-_MAX_SEARCHED_IDS:], 3, 0.3)) or "none"
    )
    return UnknownRequestError(f"none of {len(names)} requests is {name!r}; near: {near}")


@define(eq=False)
class _Fold:
    """The state of the fold after some turns."""

    config: EngineConfig
    name: str
    prefixes: PrefixTracker = Factory(
        lambda self: PrefixTracker(self.config, self.name), takes_self=True
    )
    names: dict[str, None] = field(factory=dict)  # of all requests so far, in order
    request: Request | None = None
    samples: dict[SampleId, FollowedSample] = field(factory=dict)

    @property
    def served(self) -> bool:
        """Whether all samples have ended, and were served."""
        ends = [sample.life.end for sample in self.samples.values()]
        return bool(ends) and all(end and end.reason != "rejected" for end in ends)

    def turn(self, turn: Turn) -> None:
        """Fold a turn."""
        before, parsed = turn.before, ParsedTurn.of(turn)
        if before.requests and not self.names:  # the run begins with requests in progress
            self.names = dict.fromkeys(before.requests)
            self._follow(before, turn.number - 1, {})
        for event in turn.events:
            if isinstance(event, Submit):
                self._follow_arrival(event.request, parsed)
        for sample in self.samples.values():
            if sample.life.end is None:
                sample.turn(parsed)
        self.prefixes.turn(parsed)

    def _follow_arrival(self, request: Request, parsed: ParsedTurn) -> None:
        """Follow a request that arrives, unless one of its id is being followed."""
        self.names[request.id] = None
        all_ended = all(sample.life.end for sample in self.samples.values())
        if request.id == self.name and all_ended:
            self.request = request
            ends = {end.sample: end for end in parsed.ends if end.id == self.name}
            self._follow(parsed.turn.transition.state, parsed.turn.number, ends)

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
            self.samples[name] = FollowedSample(self.config, life)
        num_known = dict(zip(state.running.ids, state.running.known, strict=True))
        for seq in (*state.waiting, *state.running.seqs):
            if seq.request.id == self.name:
                self.request = seq.request
                num_tokens = num_known.get(seq.id, len(seq.history))
                life = Life.in_progress(seq, num_tokens, state, number)
                self.samples[seq.id] = FollowedSample(self.config, life)
