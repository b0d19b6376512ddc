"""Replay: the engine folded over a journal, and every decision compared with what was
decided then.

No weights, no GPU, no clock: `step` is called with the recorded events, and the digest of
its decisions must be the recorded one, turn by turn. The same holds for another version
of the engine, or a changed policy: the first turn in which it decides otherwise is named,
with the field, and replay ends there, since what was recorded after it answers plans that
were never made.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.config import EngineConfig
from minfer.engine import step
from minfer.messages import Executed
from minfer.runs.decisions import chained, compact, facts
from minfer.runs.divergence import Divergence, diverged
from minfer.runs.journal import (
    EVERY,
    FORMAT,
    Head,
    JournalError,
    headless,
    payloads,
    read_head,
    read_turn,
)
from minfer.runs.projection import state_digest
from minfer.runs.turns import blamed
from minfer.state import EngineState, Turn


class DivergenceError(JournalError):
    """The engine does not decide as it did."""

    def __init__(self, where: Divergence) -> None:
        super().__init__(str(where))
        self.divergence = where


@frozen
class Segment:
    """One file of a journal."""

    name: str
    data: bytes  # or what reads like bytes, such as a mapped file
    head: Head
    behind: str = ""  # what is cut off behind it


@define
class Journal:
    """A recorded run: the segments that are still there, in order, without a gap.

    `config` is what the run had; a replay under another one shows where it matters first.
    After `turns` is exhausted, `count`, `results`, `digest` and `state` say where it
    ended, `closed` whether the engine was closed in order, and `torn` what is cut off at
    the end.
    """

    segments: tuple[Segment, ...]
    config: EngineConfig = field(init=False)
    count: int = field(init=False)  # turns, those of segments that are gone included
    results: int = field(init=False, default=0)  # rows of executed steps
    checked: int = field(
        init=False, default=0
    )  # digests of whole states that were compared
    digest: bytes = field(init=False)
    state: EngineState = field(init=False)
    closed: bool = field(init=False, default=False)
    torn: list[str] = field(init=False, factory=list)
    marked: tuple[int, EngineState] = field(
        init=False
    )  # the last that a digest may be about

    def __attrs_post_init__(self) -> None:
        head = self.segments[0].head
        self.config, self.count, self.digest = head.config, head.turn, head.digest
        self.state = head.begin
        self.marked = self.count, self.state
        for before, after in zip(self.segments, self.segments[1:], strict=False):
            if after.head.turn <= before.head.turn:
                raise JournalError(f"{after.name}: it does not come after {before.name}")

    @property
    def by_decisions_alone(self) -> bool:
        """Whether digests of states are of an older format: decisions are compared,
        states not.
        """
        return self.segments[0].head.format < FORMAT

    @property
    def about(self) -> Mapping[str, Any]:
        """What ran, and where."""
        return self.segments[0].head.about

    def turns(self, *, until: int | None = None) -> Iterator[Turn]:
        """Replay turns, up to and without number `until`.

        Raises DivergenceError at the first decision that is not the recorded one,
        JournalError where a file is damaged, and EngineRaisedError where a changed engine
        raises.
        """
        self.__attrs_post_init__()
        self.results = self.checked = 0
        self.torn.clear()
        for segment, following in zip(
            self.segments, [*self.segments[1:], None], strict=True
        ):
            end = following.head.turn if following else None
            records = payloads(segment.data, segment.name, torn=self.torn)
            # What follows is looked at when it is wanted only: it may be damaged.
            while (
                self.count not in (until, end)
                and (payload := self._next(records)) is not None
            ):
                if payload[:1] == b"T":
                    yield self._turn(payload, segment)
                else:
                    self._other(payload, segment.name)
            if self.count == until:
                return
            self.torn += [segment.behind] if segment.behind else []
            if following and self.count != end:
                raise JournalError(
                    f"{following.name}: it begins with turn {end}, but what comes "
                    f"before it ends after turn {self.count}"
                )
            if following:
                was, head = segment.head.config, following.head
                if (head.config, head.digest) != (was, self.digest):
                    raise JournalError(
                        f"{following.name}: it is of another run than what comes before "
                        f"it"
                    )
                self._check(self.state, head.state_digest, following.name)
        if until is not None:
            raise JournalError(
                f"there is no turn {until}: the journal has turns "
                f"{self.segments[0].head.turn} to {self.count - 1}"
            )

    def _next(self, records: Iterator[bytes]) -> bytes | None:
        try:
            return next(records, None)
        except JournalError as error:
            what = f"turns before it are whole: minfer replay --until {self.count}"
            raise JournalError(f"{error}; {what}") from None

    def _other(self, payload: bytes, where: str) -> None:
        """A record that is no turn: a digest of a state, or the end."""
        kind, about = payload[:1], int.from_bytes(payload[1:9], "little")
        if kind == b"S" and about <= self.count:
            state = {self.marked[0]: self.marked[1], self.count: self.state}.get(about)
            if state is not None:
                self._check(state, payload[9:], where)
        elif kind == b"E" and about == self.count:
            self.closed = True
        elif kind != b"H":
            what = (
                f"what comes after turn {self.count - 1} is not of it: turns are missing"
            )
            raise JournalError(f"{where}: {what}, or it is damaged")

    def _turn(self, payload: bytes, segment: Segment) -> Turn:
        before, number = self.state, self.count
        try:
            written = read_turn(payload, before, segment.head.config.block_size)
        except JournalError as error:
            raise JournalError(f"{segment.name}: turn {number}: {error}") from error
        with blamed(number, before):
            transition = step(self.config, before, written.events)
            told = facts(before, transition)
            digest = chained(self.digest, transition, compact(told))
            time = transition.state.time
        if digest != written.digest:
            raise DivergenceError(diverged(number, before, time, written.facts, told))
        self.count, self.digest, self.state = number + 1, digest, transition.state
        if self.count % EVERY == 0:
            self.marked = self.count, self.state
        results = (
            event.yields for event in written.events if isinstance(event, Executed)
        )
        self.results += sum(
            len(yields) for yields in results if isinstance(yields, tuple)
        )
        return Turn(number, before, written.events, transition)

    def _check(self, state: EngineState, expected: bytes, where: str) -> None:
        """Compare a whole state with a recorded digest, if it is one of this format."""
        if self.by_decisions_alone:
            return
        self.checked += 1
        found = state_digest(state)
        if found != expected:
            turn = self.count - 1
            raise DivergenceError(
                Divergence(
                    turn,
                    state.next_step,
                    state.time,
                    f"the state ({where})",
                    expected.hex(),
                    found.hex(),
                )
            )


def open_segments(
    files: Mapping[str, bytes], classes: Mapping[str, type] | None = None
) -> tuple[Segment, ...]:
    """The segments in `files`, name -> content, in order. Raises JournalError.

    The last of several may be cut off before its head was whole, where power failed.
    """
    found, more = list[Segment](), [classes] if classes else []
    for number, (name, data) in enumerate(files.items(), 1):
        if 1 < number == len(files) and headless(data, name):
            found[-1] = evolve(
                found[-1], behind=f"{name}: it is cut off before its first turn"
            )
        else:
            head = read_head(data, name, *more, with_state=not found)
            found.append(Segment(name, data, head))
    return tuple(found)
