"""An engine that is made up, its host, and API servers on links without sockets."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, evolve, field

from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_server.engine_server import EngineServer
from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.live.client import EngineMessage, Listener, Snapshot, TurnOutputs
from minfer.effects.live.errors import EngineDeadError, RequestError
from minfer.effects.live.request_registry import RequestRegistry, RequestStage
from minfer.effects.live.totals import NO_TOTALS
from minfer.records.messages import Admitted, Finish, Finished
from minfer.records.request import Request

READY = wire.EngineReady("cpu", 9, b"print")
IDLE = Snapshot(
    time=0.0,
    dead="",
    draining=False,
    requests=0,
    running=0,
    waiting=0,
    waiting_for={},
    blocks=9,
    blocks_free=9,
    blocks_cached=0,
    resets=0,
    stalled=0.0,
    failing=0,
    totals=NO_TOTALS,
)


def names_of(remote: RemoteEngine) -> list[str]:
    """The names of an API server's requests on its link."""
    return [name for record in remote._requests.all() for name in record.names]


def request(name: str = "a", **settings: Any) -> Request:
    return Request(id=name, prompt=(1, 2, 3), max_tokens=9, **settings)


@define(eq=False)
class MadeUp:
    """An `EngineClient` that notes what it is asked for, and says what it is told to."""

    now: float = 0.0
    state: Snapshot = IDLE
    served: dict[str, Request] = field(factory=dict)
    requested: list[tuple[str, ...]] = field(factory=list)  # what came in which turn
    cancelled: list[str] = field(factory=list)
    ends: list[Finish] = field(factory=list)
    listeners: list[Listener] = field(factory=list)
    busy: frozenset[str] = frozenset()  # ids that it takes for being served
    dead: BaseException | None = None
    unready: str = ""
    machine: str = ""
    working: bool = False
    resets: int = 0
    live: RequestRegistry = field(factory=RequestRegistry)

    def clock(self) -> float:
        return self.now

    def listen(self, listener: Listener, *, early: bool = False) -> None:
        assert early
        self.listeners.append(listener)

    def check(self, request: Request) -> None:
        """Nothing is queried."""

    def submit(self, requests: Sequence[Request]) -> None:
        if self.dead is not None:
            raise EngineDeadError("dead")
        for request in requests:
            if request.id in self.served or request.id in self.busy:
                raise RequestError(f"{request.id} is being served")
        for request in requests:
            self.live.add(request).stage = RequestStage.SUBMITTED
        self.served.update({request.id: request for request in requests})
        self.requested.append(tuple(request.id for request in requests))

    def cancel(self, ids: Iterable[str]) -> frozenset[str]:
        served_ids = frozenset(ids) & self.served.keys()
        self.cancelled += sorted(served_ids)
        return served_ids

    def finish(self, ends: Sequence[Finish]) -> None:
        self.ends += ends

    def reset_cache(self) -> None:
        """Nothing is queried."""

    def drop_adapter(self, digest: str) -> None:
        """Nothing is queried."""

    def snapshot(self) -> Snapshot:
        return self.state

    def drain(self, timeout: float | None = None) -> bool:
        raise AssertionError(timeout)

    def close(self) -> None:
        """Nothing is queried."""

    def say(self, message: EngineMessage) -> None:
        for hear in self.listeners:
            hear(message)

    def admit(self, *names: str) -> None:
        """Let requests in, and say so before their first step."""
        starts = tuple(Admitted(name, 0, 0.0, 0, 3) for name in names)
        self.say(TurnOutputs(time=self.now, arrived=names, reasons=starts))

    def give(self, **tokens: int) -> None:
        """A token for each of these requests, by id."""
        ids = tuple((name, 0) for name in tokens)
        self.say(
            TurnOutputs(
                time=self.now, ids=ids, tokens=tuple((t,) for t in tokens.values())
            )
        )

    def end(self, name: str, reason: str = "length") -> None:
        finished = Finished(name, 0, reason, 1)
        del self.served[name]
        self.live.end(name)
        self.say(TurnOutputs(time=self.now, finished=(finished,)))


@define(eq=False)
class Ends:
    """A host with API servers, which hear what it says when `carry` is called."""

    api_servers: int = 1
    engine: MadeUp = field(factory=MadeUp)
    host: EngineServer = field(init=False)
    remotes: list[RemoteEngine] = field(init=False)
    heard: list[list[EngineMessage]] = field(init=False)
    sessions: list[Session] = field(init=False)
    down: list[list[bytes]] = field(init=False)
    why: list[str] = field(factory=list)  # the engine broke

    def __attrs_post_init__(self) -> None:
        self.host = EngineServer(self.api_servers, self.why.append)
        self.remotes, self.heard, self.sessions, self.down = [], [], [], []
        for number in range(self.api_servers):
            remote = RemoteEngine(number, clock=self.engine.clock)
            self.heard.append([])
            remote.listen(self.heard[-1].append)
            self.remotes.append(remote)
            self.down.append([])
            self.sessions.append(Session(self.down[-1].append))

    def link(self, number: int = 0) -> None:
        """Have an API server make its link."""
        self.down[number] = []
        session = self.sessions[number] = Session(self.down[number].append)
        self.host.join(session)
        self.remotes[number].connect(self.speaking(session))

    def speaking(self, session: Session) -> Callable[[wire.ToEngine], None]:
        return lambda message: self.host.receive(
            session, wire.read_to_engine(wire.encode(message))
        )

    def cut(self, number: int = 0) -> None:
        self.host.leave(self.sessions[number])
        self.remotes[number].disconnect()

    def open(self) -> None:
        self.host.open(self.engine, READY)

    def carry(self) -> None:
        """Have all API servers hear what was said to them."""
        for remote, emitted in zip(self.remotes, self.down, strict=True):
            while emitted:
                remote.receive(wire.read_to_api_server(emitted.pop(0)))


def linked(api_servers: int = 1) -> Ends:
    """A host whose engine is ready, and whose API servers are there."""
    ends = Ends(api_servers)
    ends.open()
    for number in range(api_servers):
        ends.link(number)
    ends.carry()
    return ends


def other(record: Any, **values: Any) -> Any:
    """A record with these values, which must be all that it has, and none as it was."""
    names = {attribute.name for attribute in record.__attrs_attrs__ if attribute.init}
    assert names == set(values), "a field is new: does it cross the line?"
    for name, value in values.items():
        assert getattr(record, name) != value, f"{name} would not be missed"
    return evolve(record, **values)
