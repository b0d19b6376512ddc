"""Splits outputs by API server: each API server gets those of its own requests.

The rows of each API server are computed when the batch changes, not at each step; and
only then are their ids sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from attrs import define, field

from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.client import TurnOutputs
from minfer.records.messages import Finished
from minfer.records.sequence import Place, SampleIds
from minfer.records.token_logprobs import Logprobs


@define(eq=False)
class Session:
    """An API server while its link lasts; `send` must not wait, nor raise."""

    send: Callable[[bytes], None]
    # After its hello its number, or, if it is another server's, its process's `life`.
    api_server: int | None = None
    rows: tuple[int, ...] = ()  # its indices in the batch
    batch_sent: bool = False  # the batch of the last outputs was sent to it


Readers = Mapping[str, Session]  # of outputs, by request id


@define(eq=False)
class _Extras:
    """One API server's part of the outputs, besides its rows."""

    finished: list[Finished] = field(factory=list)
    arrived: list[str] = field(factory=list)
    places: dict[str, Place] = field(factory=dict)
    reasons: list[wire.WireReason] = field(factory=list)


_NO_EXTRAS: Final = _Extras()


class OutputRouter:
    """Divides outputs among sessions."""

    def __init__(self) -> None:
        self._batch: SampleIds = ()  # of the last outputs that had one

    def route(
        self, outputs: TurnOutputs, sessions: Sequence[Session], readers: Readers
    ) -> Iterator[tuple[Session, wire.ApiServerOutputs]]:
        """Yields the outputs of each session that is concerned."""
        if outputs.ids is not self._batch and outputs.ids:
            self._regroup(outputs.ids, sessions, readers)
        extras_of_session = dict[int, _Extras]()
        for end in outputs.finished:
            _extras_of(extras_of_session, readers.get(end.id)).finished.append(end)
        for name in outputs.arrived:
            _extras_of(extras_of_session, readers.get(name)).arrived.append(name)
        for name, place in outputs.places.items():
            _extras_of(extras_of_session, readers.get(name)).places[name] = place
        for reason in outputs.reasons:
            extras = _extras_of(extras_of_session, readers.get(reason.id))
            extras.reasons.append(wire.REASONS[type(reason)](reason))
        for session in sessions:
            extras = extras_of_session.get(id(session), _NO_EXTRAS)
            if extras is not _NO_EXTRAS or (outputs.ids and session.rows):
                yield session, _api_server_outputs(session, outputs, extras)

    def _regroup(
        self, batch: SampleIds, sessions: Sequence[Session], readers: Readers
    ) -> None:
        """Compute the rows of each session in a new batch."""
        self._batch = batch
        rows: dict[int, list[int]] = {id(session): [] for session in sessions}
        for row, (name, _) in enumerate(batch):
            reader = readers.get(name)
            if reader is not None and id(reader) in rows:
                rows[id(reader)].append(row)
        for session in sessions:
            session.rows = tuple(rows[id(session)])
            session.batch_sent = False


def _extras_of(extras_of_session: dict[int, _Extras], session: Session | None) -> _Extras:
    return extras_of_session.setdefault(id(session), _Extras())


def _api_server_outputs(
    session: Session, outputs: TurnOutputs, extras: _Extras
) -> wire.ApiServerOutputs:
    """Returns the outputs as sent to one API server."""
    rows = session.rows if outputs.ids else ()
    has_all = len(rows) == len(outputs.ids)
    ids: SampleIds | None = ()
    if rows and session.batch_sent:
        ids = None
    elif rows:
        ids = outputs.ids if has_all else tuple([outputs.ids[row] for row in rows])
        session.batch_sent = True
    return wire.ApiServerOutputs(
        time=outputs.time,
        ids=ids,
        tokens=outputs.tokens
        if has_all
        else tuple([outputs.tokens[row] for row in rows]),
        logprobs=_own_rows(outputs, rows),
        pooled=tuple([outputs.pooled[row] for row in rows]) if outputs.pooled else (),
        drafts=tuple([outputs.drafts[row] for row in rows]) if outputs.drafts else (),
        finished=tuple(extras.finished),
        arrived=tuple(extras.arrived),
        places=extras.places,
        reasons=tuple(extras.reasons),
        waits=dict(outputs.waits) if extras.arrived or extras.reasons else {},
    )


def _own_rows(outputs: TurnOutputs, rows: Sequence[int]) -> Logprobs:
    return tuple([outputs.logprobs[row] for row in rows]) if outputs.logprobs else ()
