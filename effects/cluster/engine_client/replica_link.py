"""An API server's link to one replica of the engine, and what that reported last."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from attrs import define

from minfer.effects.cluster.engine_client.engine_status import reported_snapshot
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import EndKind, EngineEnd
from minfer.effects.live.client import (
    BOTH,
    DECODE,
    PREFILL,
    ReplicaState,
    Snapshot,
)
from minfer.effects.live.totals import NO_TOTALS, Totals, sum_totals
from minfer.effects.net.addresses import (
    Port,
    is_wildcard,
    port_text,
)
from minfer.records.request import Request

# Engines in a row that died while they loaded, after which nothing waits for a next one.
MAX_FAILED_LOADS: Final = 2
# After the end of a link, in which a new engine's process should be there; while
# that loads, there is a link.
RESTART_SECONDS: Final = 60.0
_WAITING: Final = wire.LoadingProgress("waiting for the engine")


@define(eq=False)
class ReplicaLink:
    """The link to a replica, of which there is one at a time or none."""

    number: int  # of the replica, from 0
    prefills: bool = False  # it computes prompts for others
    is_external: bool = False  # of another server, which starts and ends it
    machine: str = ""  # where it is now, as people know that
    listens: Port | None = None  # where it receives KV from other machines
    # This machine's address on the link, if that is to another machine.
    local_address: str = ""
    send: Callable[[wire.ToEngine], None] | None = None  # None: there is no link
    # Progress of an engine that is not ready; None: it is ready.
    progress: wire.LoadingProgress | None = _WAITING
    ready: wire.EngineReady | None = None  # the engine's facts, once it was ready
    # The request that the engine serves alone, or soon will, by its name on the link.
    probing: str = ""
    alone: bool = False  # no other request runs, and it has started
    lost_at: float = -math.inf  # when the last link ended
    snapshot: Snapshot | None = None  # the engine's last state
    past: Totals = NO_TOTALS  # of earlier engines
    last_message: float = 0.0
    failures: int = 0  # engines in a row that were never ready
    ends: int = 0  # how many of its engines had ended when the last link began

    @property
    def name(self) -> str:
        """Its name in metrics, records and the router."""
        return str(self.number)

    @property
    def unready(self) -> str:
        """What requests wait for, or nothing."""
        if self.progress is None:
            return ""
        share = f" ({self.progress.done} of {self.progress.total})"
        return self.progress.stage + (share if self.progress.total else "")

    def pushes_to(self, target: "ReplicaLink") -> str:
        """Returns how this one names another one, to which it sends KV."""
        if not self.local_address or target.listens is None:
            return target.name
        host, port = target.listens
        return port_text(
            (self.local_address if is_wildcard(target.listens) else host, port)
        )

    def connect(
        self, send: Callable[[wire.ToEngine], None], now: float, local_address: str = ""
    ) -> None:
        """Note a new link."""
        self.send, self.local_address = send, local_address
        self.last_message = now
        self.progress = wire.LoadingProgress("connecting")

    def submit(self, new: Sequence[Request], resumed: Sequence[wire.Resumed]) -> None:
        """Send requests to the engine: all new ones enter the same turn."""
        if self.send is None:
            return
        if new:
            self.send(wire.SubmitRequests(tuple(new)))
        if resumed:
            self.send(wire.ResumeRequests(tuple(resumed)))

    def end_of_last(self, end: EngineEnd) -> EndKind:
        """Returns how the engine of the link before ended, when a new one begins; `end`
        is the last one of its engines.
        """
        is_new, self.ends = end.number != self.ends, end.number
        is_known = end.kind is not EndKind.UNKNOWN
        return EndKind.KILLED if is_known and not is_new else end.kind

    @property
    def takes_requests(self) -> bool:
        """Whether it takes requests: it is ready, and serves none alone."""
        return self.send is not None and self.progress is None and not self.probing

    def will_take(self, now: float) -> bool:
        """Returns whether it takes no requests now, but probably will soon: its engine
        loads, serves a suspect, or died less than `RESTART_SECONDS` ago.
        """
        if self.takes_requests or self.failures >= MAX_FAILED_LOADS:
            return False
        return self.send is not None or now < self.lost_at + RESTART_SECONDS

    def disconnect(self, now: float) -> None:
        """Note that the link is over."""
        self.failures = 0 if self.progress is None else self.failures + 1
        self.send, self.probing, self.progress = None, "", _WAITING
        self.alone, self.lost_at = False, now

    def note_status(self, snapshot: Snapshot) -> None:
        """Note the engine's state; a new engine counts from zero."""
        if self.snapshot is not None:
            before = self.snapshot.totals
            now = snapshot.totals.counts
            if any(now.get(name, 0) < count for name, count in before.counts.items()):
                self.past = sum_totals([self.past, before])
        self.snapshot = snapshot

    @property
    def totals(self) -> Totals:
        """The counts of all engines so far."""
        last = NO_TOTALS if self.snapshot is None else self.snapshot.totals
        return sum_totals([self.past, last])

    def current_snapshot(self, now: float, *, busy: bool) -> Snapshot | None:
        """Returns the engine's state; `busy`: it has requests of this API server."""
        if self.snapshot is None:
            return None
        quiet_seconds = now - self.last_message if busy else 0.0
        return reported_snapshot(
            now, self.snapshot, quiet_seconds, ready=self.progress is None
        )

    def state(self, *, has_prefillers: bool) -> ReplicaState:
        """Returns the engine's state among several; `has_prefillers`: some compute
        prompts for the others.
        """
        last = self.snapshot
        alive = last is not None and self.progress is None
        blocks = last.blocks if last else 0
        return ReplicaState(
            name=self.name,
            machine=self.machine,
            role=BOTH if not has_prefillers else PREFILL if self.prefills else DECODE,
            unready=self.unready,
            running=last.running if last and alive else 0,
            waiting=last.waiting if last and alive else 0,
            blocks=blocks,
            blocks_free=last.blocks_free if last and alive else blocks,
        )
