"""A journal of a router: every request and event, and every decision, as lines of JSON;
and its replay.

Theory. The router is a function, so its inputs replay it: the configuration, and turn by
turn the events, or the request that was routed. Decisions and reasons are written beside
them, with a digest that is chained from turn to turn. A replay takes the same turns with
the present router; at the first turn that decides otherwise it stops, and names the
field. It also stops where lines are missing or damaged, as their digests do not follow.

    {"minfer routing journal": 2, "config": .., "about": ..}
    {"events": [..], "reasons": [..], "digest": ".."}
    {"request": .., "decision": .., "digest": ".."}
    {"closed": number of turns}

Records are written as `minfer.journal.codec` does, except that keys of equal length are
one text in base64. A file may end anywhere: a last line that is cut off was never
acknowledged, and is left out. One that has no last line with `closed` was cut short, or
goes on; earlier versions wrote none.
"""

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import attrs
from attrs import define, field, frozen

from minfer.blocks.keys import Keys
from minfer.journal.codec import dump, load
from minfer.journal.decisions import compact
from minfer.journal.divergence import MAX_FACT_LEVELS, first_difference, is_shallow
from minfer.journal.format import READS_OLDER, START_DIGEST, JournalError
from minfer.routing import messages, policies
from minfer.routing.messages import RouterEvent, RoutingRequest
from minfer.routing.router import AppliedEvents, Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState

NAME: Final = "minfer routing journal"
FORMAT: Final = 2


def _records() -> dict[str, type]:
    values = (*vars(messages).values(), *vars(policies).values(), RouterConfig)
    return {c.__name__: c for c in values if isinstance(c, type) and attrs.has(c)}


ROUTING_RECORDS: Final = _records()  # programs add their own policies


@frozen
class RoutingTurn:
    """Events that were applied, or a request that was routed, with the result."""

    number: int  # from 0
    inputs: tuple[RouterEvent, ...] | RoutingRequest
    result: AppliedEvents | Routed


class RoutingDivergenceError(JournalError):
    """The router decides otherwise than recorded: the turn, and the first field that
    differs.
    """

    def __init__(self, turn: int, name: str, expected: Any, actual: Any) -> None:
        self.turn, self.field = turn, name
        self.expected, self.found = expected, actual
        super().__init__(
            f"turn {turn} decides otherwise: {name} was {expected!r:.300}, "
            f"is {actual!r:.300}"
        )


# --- writing ----------------------------------------------------------------------------


@define
class RoutingWriter:
    """Makes the lines of a journal, one after the other. Raises CodecError for policies
    that cannot be written.
    """

    config: RouterConfig
    about: Mapping[str, Any] = field(factory=dict)  # what ran, and where
    digest: bytes = START_DIGEST
    count: int = 0  # turns

    def head(self) -> bytes:
        """The first line."""
        config = dump(self.config)
        return _line({NAME: FORMAT, "config": config, "about": self.about})

    def applied(self, events: Iterable[RouterEvent], result: AppliedEvents) -> bytes:
        """The line of events and their reasons."""
        return self._turn({"events": [_dump_event(event) for event in events]}, result)

    def routed(self, request: RoutingRequest, result: Routed) -> bytes:
        """The line of a request and the decision about it."""
        return self._turn({"request": _dump_event(request)}, result)

    def end(self) -> bytes:
        """The last line, of a router that was closed."""
        return _closing_line(self.count) + b"\n"

    def _turn(self, inputs: dict[str, Any], result: AppliedEvents | Routed) -> bytes:
        self.count += 1
        decided = _decisions(result)
        self.digest = _extend_digest(self.digest, inputs, decided)
        return _line({**inputs, **decided, "digest": self.digest.hex()})


def _line(record: Any) -> bytes:
    return compact(record) + b"\n"


def _closing_line(turns: int) -> bytes:
    return compact({"closed": turns})


def _decisions(result: AppliedEvents | Routed) -> dict[str, Any]:
    """The decisions of a turn, in JSON types."""
    if isinstance(result, AppliedEvents):
        return {"reasons": [dump(reason) for reason in result.reasons]}
    return {"decision": dump(result.reason)}


def _extend_digest(
    digest: bytes, inputs: dict[str, Any], decided: dict[str, Any]
) -> bytes:
    """The digest after one more turn, over its input and its decisions."""
    text = compact([inputs, decided])
    return blake2b(digest + text, digest_size=len(START_DIGEST)).digest()


def _pop_decisions(record: dict[str, Any]) -> dict[str, Any]:
    """The decisions of a line, which are taken out of it."""
    names = [name for name in ("reasons", "decision") if name in record]
    decisions: dict[str, Any] = {name: record.pop(name) for name in names}
    if not is_shallow(decisions, MAX_FACT_LEVELS):
        raise ValueError("decisions that no router makes")
    return decisions


def _dump_event(event: Any) -> Any:
    """An event or a request in JSON types; null for what is neither."""
    if type(event) is not RoutingRequest and type(event) not in messages.ROUTER_EVENTS:
        return None  # it is ignored or refused, and so is its replacement
    record = dump(event, without=("keys", "request"))
    if getattr(event, "keys", ()):
        record["keys"] = _dump_keys(event.keys)
    if isinstance(event, messages.Dispatched):
        record["request"] = _dump_event(event.request)
    return record


def _dump_keys(keys: Keys) -> Any:
    """Keys as one text with their length, if that is the same for all."""
    (size, *other_sizes) = {len(key) for key in keys}
    if other_sizes or not size:
        return dump(keys)
    text = b2a_base64(b"".join(keys), newline=False).decode()
    return {"size": size, "base64": text}


# --- reading ----------------------------------------------------------------------------


@define
class RoutingJournal:
    """A recorded run. After `turns` is exhausted, `count` is the number of turns, `state`
    the router's at the end, `closed` whether the router was closed in order, and `torn`
    the bytes of a last line that is cut off.

    Raises JournalError for what is no journal. `classes` are the records that may be in
    it; another `config` than the recorded one shows the first turn in which that matters.
    """

    data: bytes
    classes: Mapping[str, type] = ROUTING_RECORDS
    config: RouterConfig = field(init=False)
    about: Mapping[str, Any] = field(init=False)
    state: RouterState = field(init=False)
    count: int = field(init=False, default=0)
    torn: int = field(init=False, default=0)
    closed: bool = field(init=False, default=False)
    _lines: list[bytes] = field(init=False)

    def __attrs_post_init__(self) -> None:
        head, *self._lines = self.data.split(b"\n")
        try:
            record = json.loads(head)
            version = record[NAME]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise JournalError("this is no routing journal of minfer") from None
        if version != FORMAT:
            kind = type(version).__name__
            text = version if isinstance(version, int) else f"of a {kind}"
            reader = "the minfer that wrote it"
            if version == 1:
                reader = f"{READS_OLDER}, the last that reads it"
            raise JournalError(
                f"this routing journal has format {text}, and this minfer reads format "
                f"{FORMAT}; replay it with {reader}"
            )
        try:
            self._read_head(record)
        except Exception as error:  # a head may have anything
            raise JournalError(f"its head cannot be read: {error}") from error

    def _read_head(self, record: Any) -> None:
        self.config = load(record["config"], self.classes)
        self.about = record["about"]
        if type(self.config) is not RouterConfig or not isinstance(self.about, dict):
            raise TypeError("a part of it has another type")
        self.state = initial_router(self.config)

    def turns(self) -> Iterator[RoutingTurn]:
        """Replay all turns. Raises RoutingDivergenceError at the first decision that
        differs, and JournalError where the journal is damaged.
        """
        self.state, self.count, digest = initial_router(self.config), 0, START_DIGEST
        self.torn = len(self._lines[-1]) if self._lines else 0
        self.closed = False
        for line in self._lines[:-1]:
            if self.closed:
                raise JournalError("lines follow its end: it is damaged")
            if line == _closing_line(self.count):
                self.closed = True
                continue
            turn, digest = self._turn(line, digest)
            self.state = turn.result.state
            self.count += 1
            yield turn

    def _turn(self, line: bytes, digest: bytes) -> tuple[RoutingTurn, bytes]:
        """Take the turn of a line; returns it, and the digest after it."""
        try:
            record = json.loads(line)
            written, expected = record.pop("digest"), _pop_decisions(record)
            follows = _extend_digest(digest, record, expected).hex() == written
            inputs = self._load_inputs(record) if follows else ()
        except Exception as error:  # a digest says nothing about the content
            problem = f"turn {self.count} cannot be read: {error!r}"
            raise JournalError(problem) from error
        if not follows:
            raise JournalError(
                f"turn {self.count} does not follow from those before it: lines are "
                "missing, out of order or damaged"
            )
        try:
            result = self._decide(inputs)
            actual = json.loads(compact(_decisions(result)))
        except Exception as error:
            raise JournalError(
                f"turn {self.count}: the router raised {error!r}"
            ) from error
        if actual != expected:
            name = next(iter(expected), next(iter(actual)))
            path, old, new = first_difference(name, expected.get(name), actual.get(name))
            raise RoutingDivergenceError(self.count, path, old, new)
        return RoutingTurn(self.count, inputs, result), bytes.fromhex(written)

    def _decide(self, inputs: Any) -> AppliedEvents | Routed:
        """What the present router makes of the input of a turn."""
        if isinstance(inputs, tuple):
            return apply(self.config, self.state, inputs)
        return route(self.config, self.state, inputs)

    def _load_inputs(self, record: Any) -> Any:
        """The input of a turn."""
        if "events" in record:
            return tuple([self._load_event(event) for event in record["events"]])
        return self._load_event(record["request"])

    def _load_event(self, record: Any) -> Any:
        if record is None:
            return None
        fields = {"keys": ()} | record if record["is"] in _WITH_KEYS else dict(record)
        if isinstance(fields.get("keys"), dict):
            fields["keys"] = _load_keys(**fields["keys"])
        if "request" in fields:
            fields["request"] = self._load_event(fields["request"])
        plain = {name: _load_field(value, self.classes) for name, value in fields.items()}
        return self.classes[plain.pop("is")](**plain)


_WITH_KEYS: Final = ("RoutingRequest", "BlocksPublished", "BlocksEvicted")


def _load_field(value: Any, classes: Mapping[str, type]) -> Any:
    is_loaded = isinstance(value, tuple | RoutingRequest)
    return value if is_loaded else load(value, classes)


def _load_keys(size: int, base64: str) -> Keys:
    data = a2b_base64(base64)
    return tuple([data[start : start + size] for start in range(0, len(data), size)])
