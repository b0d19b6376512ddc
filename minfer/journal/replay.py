"""Replay: runs the engine on a journal, and compares every decision with the recorded
one.

No weights, no GPU, no clock: `step` is called with the recorded events, and the digest of
its decisions must be the recorded one, turn by turn. So it also tests another version of
the engine, or a changed policy: replay stops at the first turn that decides differently,
and names the field, as the results recorded after it answer plans that were never made.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.engine import step
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.journal.divergence import Divergence, find_divergence
from minfer.journal.format import TURNS_PER_STATE_DIGEST, Head, JournalError
from minfer.journal.overrides import OverrideCounts
from minfer.journal.projection import state_digest
from minfer.journal.reading import (
    lacks_head,
    payloads,
    read_head,
    read_turn,
    submitted_ids,
)
from minfer.journal.turns import wrap_engine_errors
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed
from minfer.records.state import EngineState, Turn


class DivergenceError(JournalError):
    """A decision of the engine differs from the one recorded in a file."""

    def __init__(self, file_name: str, divergence: Divergence) -> None:
        super().__init__(f"{file_name}: {divergence}")
        self.divergence = divergence


@frozen
class Segment:
    """One file of a journal."""

    name: str
    data: bytes  # or a bytes-like object, such as a mapped file
    head: Head
    cut_off: str = ""  # description of what is cut off after it


@define
class Journal:
    """A recorded run: the segments that still exist, in order, without a gap.

    After `turns` is exhausted, `count`, `results`, `digest` and `state` describe its end,
    `overrides` counts the policy's answers that could not be used, `closed` is whether
    the engine was closed in order, and `torn` what is cut off at the end. A replay under
    another configuration than that of the first head shows the first turn in which that
    matters.
    """

    segments: tuple[Segment, ...]
    count: int = field(init=False)  # turns, with those of removed segments
    results: int = field(init=False)  # rows of executed steps
    checked: int = field(init=False)  # digests of whole states that were compared
    digest: bytes = field(init=False)
    state: EngineState = field(init=False)
    overrides: OverrideCounts = field(init=False)
    closed: bool = field(init=False)
    torn: list[str] = field(init=False)
    # the last turn count, and its state, of which the journal may have a digest
    last_mark: tuple[int, EngineState] = field(init=False)

    def __attrs_post_init__(self) -> None:
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            if after.head.turn <= before.head.turn:
                raise JournalError(f"{after.name}: it does not come after {before.name}")
        self.rewind()

    def rewind(self) -> None:
        """Go back to before the first existing turn."""
        first = self.segments[0].head
        self.count = first.turn
        self.results = 0
        self.checked = 0
        self.overrides = OverrideCounts()
        self.digest = first.digest
        try:
            self.state = first.begin
        except Exception as error:  # a policy may raise anything
            problem = f"its configuration cannot be used: {error}"
            raise JournalError(f"{self.segments[0].name}: {problem}") from error
        self.closed = False
        self.torn = []
        self.last_mark = self.count, self.state

    @property
    def config(self) -> EngineConfig:
        """The configuration of the recorded engine."""
        return self.segments[0].head.config

    @property
    def about(self) -> Mapping[str, Any]:
        """The description of what ran, and where."""
        return self.segments[0].head.about

    def request_ids(self, *, strict: bool = False) -> list[str]:
        """The ids of all its requests, without a replay; in a damaged file, those before
        the damage, or with `strict` a JournalError.
        """
        ids = [*self.segments[0].head.begin.requests]
        with nullcontext() if strict else suppress(JournalError):
            for segment in self.segments:
                ids += submitted_ids(segment.data, segment.name)
        return ids

    def turns(self, *, until: int | None = None) -> Iterator[Turn]:
        """Replay turns from the first, up to and including number `until`.

        Raises DivergenceError at the first decision that differs from the recorded one,
        JournalError at damage of a file, and EngineRaisedError if a changed engine
        raises.
        """
        self.rewind()
        followers = (*self.segments[1:], None)
        for segment, following in zip(self.segments, followers, strict=True):
            # Later records are read only when needed: they may be damaged.
            yield from self._segment_turns(segment, following, until)
            if self.count == until:
                return
            if segment.cut_off:
                self.torn.append(segment.cut_off)
            if following:
                self._join(segment, following)
        if until is not None:
            raise JournalError(
                f"there is no turn {until}: the journal has turns "
                f"{self.segments[0].head.turn} to {self.count - 1}"
            )

    def _segment_turns(
        self, segment: Segment, following: Segment | None, until: int | None
    ) -> Iterator[Turn]:
        """The turns of a segment, up to turn `until` or the first of the `following` one,
        which may overlap with this one.
        """
        end = following.head.turn if following else None
        records = payloads(segment.data, segment.name, torn=self.torn)
        while self.count not in (until, end):
            payload = self._next_record(records)
            if payload is None:
                return
            if payload[:1] == b"T":
                yield self._turn(payload, segment)
            else:
                self._read_mark(payload, segment.name)

    def _join(self, segment: Segment, following: Segment) -> None:
        """Check that the next segment begins where this one ended."""
        name, head = following.name, following.head
        if self.count != head.turn:
            raise JournalError(
                f"{name}: it begins with turn {head.turn}, but what comes before it ends "
                f"after turn {self.count}"
            )
        if (head.config, head.digest) != (segment.head.config, self.digest):
            raise JournalError(f"{name}: it is of another run than what comes before it")
        self._check(self.state, head.state_digest, name)

    def _next_record(self, records: Iterator[bytes]) -> bytes | None:
        try:
            return next(records, None)
        except JournalError as error:
            advice = f"turns before it are whole: minfer replay --until {self.count}"
            raise JournalError(f"{error}; {advice}") from None

    def _read_mark(self, payload: bytes, file_name: str) -> None:
        """Read a record that is not a turn: a digest of a state, or the end."""
        kind, number = payload[:1], int.from_bytes(payload[1:9], "little")
        if kind == b"S" and number <= self.count:
            known_states = {self.last_mark[0]: self.last_mark[1], self.count: self.state}
            state = known_states.get(number)
            if state is not None:
                self._check(state, payload[9:], file_name)
        elif kind == b"E" and number == self.count:
            self.closed = True
        elif kind != b"H":
            problem = (
                f"what comes after turn {self.count - 1} is not of it: turns are missing"
            )
            raise JournalError(f"{file_name}: {problem}, or it is damaged")

    def _turn(self, payload: bytes, segment: Segment) -> Turn:
        """Take the turn of a record with the present engine."""
        before, number = self.state, self.count
        try:
            written = read_turn(payload, before, segment.head)
        except JournalError as error:
            raise JournalError(f"{segment.name}: turn {number}: {error}") from error
        with wrap_engine_errors(number, before, segment.name):
            transition = step(self.config, before, written.events)
            decided = facts(before, transition)
            digest = extend_digest(self.digest, transition, compact(decided))
            time = transition.state.time
        if digest != written.digest:
            first = find_divergence(number, before, time, written.facts, decided)
            raise DivergenceError(segment.name, first)
        self.count = number + 1
        self.digest = digest
        self.state = transition.state
        if self.count % TURNS_PER_STATE_DIGEST == 0:
            self.last_mark = self.count, self.state
        for event in written.events:
            if isinstance(event, Executed) and isinstance(event.yields, tuple):
                self.results += len(event.yields)
        turn = Turn(number, before, written.events, transition)
        self.overrides.fold(turn)
        return turn

    def _check(self, state: EngineState, expected: bytes, file_name: str) -> None:
        """Compare a whole state with a recorded digest."""
        self.checked += 1
        actual = state_digest(state)
        if actual != expected:
            raise DivergenceError(
                file_name,
                Divergence(
                    turn=self.count - 1,
                    step=state.next_step,
                    time=state.time,
                    field=f"the state ({file_name})",
                    expected=expected.hex(),
                    found=actual.hex(),
                ),
            )


def open_segments(
    files: Mapping[str, bytes], classes: Mapping[str, type] | None = None
) -> tuple[Segment, ...]:
    """The segments in `files`, name -> content, in order. Raises JournalError.

    The last of several may be cut off within its head, after a power failure.
    """
    segments, extra_args = list[Segment](), [classes] if classes else []
    for number, (name, data) in enumerate(files.items(), 1):
        if 1 < number == len(files) and lacks_head(data, name):
            segments[-1] = evolve(
                segments[-1], cut_off=f"{name}: it is cut off before its first turn"
            )
        else:
            head = read_head(data, name, *extra_args, with_state=not segments)
            segments.append(Segment(name, data, head))
    return tuple(segments)
