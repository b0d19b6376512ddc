"""GET /live: the engine's state, twice a second, while a viewer is connected.

    EngineClient.snapshot() --> LiveFigures --> one JSON object --> every viewer

Theory. The engine only counts: its totals grow from its start on. A viewer keeps earlier
totals, and computes rates and percentiles of any interval as differences; so the server
keeps no state for viewers, and does nothing while there are none. Viewers that are
connected at the same time share one snapshot. There may be `MAX_VIEWERS` of them, at all
API servers together, which bounds their cost.

`GET /live` is a stream of server-sent events, `GET /live?once=1` one of the same objects.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import attrs
from attrs import frozen
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import minfer
from minfer.effects.live.client import EngineClient, ReplicaState, Snapshot
from minfer.effects.live.totals import (
    ACCEPTED_PER_POSITION,
    COUNTERS,
    ITL,
    SECONDS_BOUNDS,
    TTFT,
    Histogram,
    HistogramBuilder,
)
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.wire.shared_counts import SharedCount
from minfer.effects.serving.wire.sse import EventStream
from minfer.effects.serving.wire.transport import StreamEvent
from minfer.records.config import EngineConfig

PERIOD_SECONDS: Final = 0.5  # between two snapshots
MAX_VIEWERS: Final = 32  # viewers at a time
OVERLOADED: Final = 503
_ONCE: Final = {"": False, "0": False, "1": True}  # what ?once= may be
_NO_STORE: Final = {"Cache-Control": "no-store"}


@frozen
class Distribution:
    """A histogram of values of one kind, since the engine's start."""

    bounds: tuple[float, ...]  # upper ones, ascending
    counts: tuple[int, ...]  # up to each bound, from the one before; then above all
    total: float  # the sum of the values

    @classmethod
    def of(cls, histogram: Histogram | None) -> "Distribution":
        """A histogram of an engine's totals; an empty one, if it has none."""
        if histogram is None:
            histogram = HistogramBuilder(SECONDS_BOUNDS).histogram()
        return cls(histogram.bounds, histogram.counts, histogram.total)


@frozen(kw_only=True)
class LiveFigures:
    """The data for a viewer: the present state, and counts since the start."""

    version: str
    time: float  # seconds, on the engine's clock
    uptime: float  # seconds
    health: str  # "ok", or the error
    requests: int  # being served
    running: int  # samples
    rows: int  # samples that may run at once
    waiting: int  # samples
    waiting_for: Mapping[str, int]  # of these, by cause
    blocks: int  # of the KV cache
    blocks_used: int
    blocks_cached: int  # in the prefix cache, unused; evicted as space is needed
    blocks_free: int  # without content in the prefix cache
    block_size: int  # tokens
    counts: Mapping[str, int]  # by name, since the start
    ttft: Distribution  # seconds to the first token
    itl: Distribution  # seconds from one token to the next
    accepted: tuple[int, ...]  # accepted drafts, by place, since the start
    replicas: tuple[ReplicaState, ...]  # each engine, if there are several

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        config: EngineConfig,
        *,
        started: float,
        health_error: str,
    ) -> "LiveFigures":
        """The figures of a snapshot, of a server that was `started` at that time."""
        return cls(
            version=minfer.__version__,
            time=snapshot.time,
            uptime=max(0.0, snapshot.time - started),
            health=health_error or "ok",
            requests=snapshot.requests,
            running=snapshot.running,
            rows=config.max_num_seqs * max(1, len(snapshot.replicas)),
            waiting=snapshot.waiting,
            waiting_for=snapshot.waiting_for,
            blocks=snapshot.blocks,
            blocks_used=snapshot.blocks - snapshot.blocks_free,
            blocks_cached=snapshot.blocks_cached,
            blocks_free=snapshot.blocks_free - snapshot.blocks_cached,
            block_size=config.block_size,
            counts={name: int(snapshot.totals.counts.get(name, 0)) for name in COUNTERS},
            ttft=Distribution.of(snapshot.totals.histograms.get(TTFT)),
            itl=Distribution.of(snapshot.totals.histograms.get(ITL)),
            accepted=_accepted(snapshot.totals.counts),
            replicas=snapshot.replicas,
        )


def _accepted(counts: Mapping[str, float]) -> tuple[int, ...]:
    """The number of accepted drafts by position, from the first on."""
    accepted = list[int]()
    while (count := counts.get(f"{ACCEPTED_PER_POSITION}{len(accepted)}")) is not None:
        accepted.append(int(count))
    return tuple(accepted)


class LiveView:
    """The live view of an engine. `health_error` returns the error of the server, or an
    empty string; `closing`, whether it is stopping.
    """

    def __init__(
        self,
        client: EngineClient,
        config: EngineConfig,
        health_error: Callable[[], str],
        closing: Callable[[], bool],
        viewers: SharedCount,
    ) -> None:
        self._client = client
        self._config = config
        self._health_error = health_error
        self._closing = closing
        self._started = client.clock()
        self._frame = ""  # the last frame
        self._made_at = 0.0  # when it was made, on the event loop's clock
        self._viewers = viewers

    @property
    def viewers(self) -> int:
        """How many viewers are connected to this process."""
        return self._viewers.own

    def figures(self) -> LiveFigures:
        """The figures as they are now."""
        health_error = self._health_error()
        snapshot = self._client.snapshot()
        return LiveFigures.of(
            snapshot, self._config, started=self._started, health_error=health_error
        )

    async def serve(self, request: Request) -> Response:
        """Answer a GET: with a stream, or once."""
        once = _ONCE.get(request.query_params.get("once", ""))
        if once is None:
            raise ApiError("must be 1 for one object, 0 for a stream", "once")
        if once or request.method == "HEAD":  # of which a stream would never end
            return JSONResponse(attrs.asdict(self.figures()), headers=_NO_STORE)
        frames = self._frames()
        await anext(frames)  # counts the viewer, until the generator ends
        if self._viewers.total > MAX_VIEWERS:
            await frames.aclose()
            message = (
                f"{MAX_VIEWERS} viewers look already; close one, or ask for /live?once=1"
            )
            raise ApiError(message, None, "too_many_viewers", OVERLOADED)
        kind = EventStream.content_type.decode()
        return StreamingResponse(frames, media_type=kind, headers=_NO_STORE)

    async def _frames(self) -> AsyncGenerator[str]:
        """A frame each period, until the viewer disconnects or the server stops."""
        self._viewers.set(self.viewers + 1)
        try:
            yield ""
            while not self._closing():
                yield self._current_frame()
                await asyncio.sleep(PERIOD_SECONDS)
            yield self._current_frame()  # which has the reason of the end
        finally:
            self._viewers.set(self.viewers - 1)

    def _current_frame(self) -> str:
        """The present frame: viewers within half a period of each other get the same."""
        now = asyncio.get_running_loop().time()
        if not self._frame or now - self._made_at > PERIOD_SECONDS / 2 or self._closing():
            data = json.dumps(attrs.asdict(self.figures()))
            self._frame = EventStream.frame([StreamEvent(data)])
            self._made_at = now
        return self._frame
