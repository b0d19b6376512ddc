"""API servers, an engine that dies, and links that fail: in one thread, by a seed.

Links have the faults of ordered sockets: they carry bytes, in pieces that are cut
anywhere; they stall; they end, and what is on its way comes up to some byte; and an end
can say what is no message.

A world is hostile for some moves, then it heals, and then everything must end. What each
request got is compared with what it gets where nothing ever happens.
"""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from random import Random
from typing import Never

from attrs import define, evolve, field, frozen

from minfer.blocks.keys import Key, block_keys
from minfer.effects.cluster.engine_client.api_server_router import ApiServerRouter
from minfer.effects.cluster.engine_client.prefill_first import PrefillFirst
from minfer.effects.cluster.engine_client.remote_engine import RemoteEngine
from minfer.effects.cluster.engine_server.cache_event_publisher import CacheEventPublisher
from minfer.effects.cluster.engine_server.engine_server import EngineServer
from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.cluster.link.crash_rule import EndKind, EngineEnd
from minfer.effects.live.client import EngineMessage, TurnOutputs
from minfer.effects.live.engine.driver import Driver
from minfer.effects.live.engine.engine_worker import EngineWorker
from minfer.effects.live.request_names import request_of
from minfer.effects.live.totals import NO_TOTALS
from minfer.effects.net.framing import FrameReader, PeerError, frame
from minfer.effects.text.grammars.grammar_library import Grammar, GrammarError
from minfer.effects.text.grammars.store import Grammars
from minfer.records.config import EngineConfig
from minfer.records.messages import FetchBlocks, Finish, Finished
from minfer.records.plan import NewRow, Plan
from minfer.records.request import Request, SamplingParams
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Transition
from minfer.records.tiers import LOAD, RECOMPUTE, ExternalStore
from minfer.routing.policies import Prefix, routing_policy_named
from minfer.routing.state import RouterConfig
from minfer.sampling.structured import StructuredOutputs
from minfer.simulation.oracle import Oracle

VOCAB = 50
CONFIG = EngineConfig(
    num_blocks=60,
    block_size=4,
    max_model_len=64,
    max_num_seqs=6,
    max_num_batched_tokens=32,
    vocab_size=VOCAB,
    depth=2,
)
READY = wire.EngineReady("cpu", CONFIG.num_blocks, b"print")
BOUND = 0.2  # of requests: they have a constraint
CUT = 0.5  # of links to other machines that are over: the network failed
STEP = 0.01  # seconds on the world's clock that a move takes
SPLIT = 0.2  # of pieces: a part of the next one comes with it
GARBAGE = 0.3  # of spoilt links: an end says what is no message
NOISE = (  # a length that no end sends, no message, and one of no kind
    (wire.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
    frame(b"noise"),
    frame(b"\x81\xa4type\xa1x"),
    frame(b""),
)
STALL = 1.0  # seconds at most in which an end of a link gets nothing
MOST_MOVES = 60_000


class Inline(EngineWorker):
    """An engine that turns when it is told to."""

    def _wake(self) -> None:
        self.running = True

    def pump(self) -> None:
        """Take a turn, if one is due."""
        if self.driver.busy:
            self._turn()
        self.running = self.driver.busy


class Killed(Exception):  # noqa: N818 - it is what happened, and no error of ours
    """The engine's process is gone."""


@frozen
class Poison:
    """What kills an engine: a request, or one of its samples."""

    name: str = ""  # the request's; none: nothing does
    after: int = 0  # steps of its in each engine
    at: int = 0  # tokens of output, beyond those steps
    sample: int | None = None  # None: each
    end: EndKind = EndKind.CRASHED  # how an engine ends of it

    def steps(self, opened: NewRow) -> int | None:
        """How many steps of a row go well; None: all."""
        if not self.name or opened.name[0].split("#")[0] != self.name:
            return None
        if self.sample not in (None, opened.sampling.sample):
            return None
        return self.after + max(0, self.at - len(opened.known) + opened.prompt)


class Poisoned(Oracle):
    """An executor whose process dies when a row of a poisonous request runs."""

    def __init__(self, poison: Poison, outside: dict[Key, list[list[int]]]) -> None:
        super().__init__(CONFIG.block_size, VOCAB)
        self.poison = poison
        self.outside = outside  # what engines send each other, and none of them loses
        self.left: dict[int, int] = {}  # steps of poisonous rows

    def launch(self, plan: Plan) -> None:
        """Launch a plan, or die."""
        for opened in plan.opens:
            row = plan.rows[opened.index]
            self.left.pop(row, None)
            if (steps := self.poison.steps(opened)) is not None:
                self.left[row] = steps
        for row in self.left.keys() & set(plan.rows):
            if not self.left[row]:
                raise Killed
            self.left[row] -= 1
        super().launch(plan)


class CompilingRequests(Grammars):
    """Compiles a constraint on request: each anew."""

    def __init__(self) -> None:
        super().__init__(lambda: self.fail())
        self.begun: deque[tuple[StructuredOutputs, Future[Grammar]]] = deque()

    def fail(self) -> Never:
        """Its result is not needed."""
        raise AssertionError

    def begin(self, requested: StructuredOutputs, client: str = "") -> "Future[Grammar]":
        del client
        wait: Future[Grammar] = Future()
        self.begun.append((requested, wait))
        return wait

    def move(self, poison: str) -> None:
        """Compile what came first, or die of it."""
        if not self.begun:
            return
        requested, wait = self.begun.popleft()
        if wait.cancelled():
            return
        if requested.text == poison:
            raise Killed
        wait.set_exception(GrammarError("whatever it is, its masks say it"))


def solo(request: Request) -> dict[int, tuple[int, ...]]:
    """What each sample of a request gets where nothing happens."""
    outputs: dict[int, list[int]] = {i: [] for i in range(request.n)}
    engine = Inline(Driver(CONFIG, Oracle(CONFIG.block_size, VOCAB)))

    def hear(message: EngineMessage) -> None:
        assert isinstance(message, TurnOutputs)
        for (_, sample), tokens in zip(message.ids, message.tokens, strict=True):
            outputs[sample] += tokens

    engine.listen(hear)
    engine.submit([request])
    while engine.live:
        engine.pump()
    return {i: tuple(tokens) for i, tokens in outputs.items()}


@define(eq=False)
class Way:
    """One direction of a link: bytes on their way, and who reads them."""

    pieces: deque[bytes] = field(factory=deque)
    reader: FrameReader = field(factory=lambda: FrameReader(wire.MAX_MESSAGE_BYTES))
    stalled: float = 0.0  # nothing arrives before this time

    def __len__(self) -> int:
        """How many pieces are on their way."""
        return len(self.pieces)

    def say(self, message: bytes) -> None:
        """Send a message."""
        self.pieces.append(frame(message))

    def arrive(self, rng: Random) -> list[bytes]:
        """Returns the messages that come next: a piece, and perhaps a part of another."""
        piece = self.pieces.popleft()
        if self.pieces and rng.random() < SPLIT:
            next_piece = self.pieces.popleft()
            offset = rng.randint(0, len(next_piece))
            self.pieces.appendleft(next_piece[offset:])
            piece += next_piece[:offset]
        return self.reader.feed(piece)

    def cut(self, rng: Random) -> None:
        """What is on its way comes up to some byte only, perhaps in a message."""
        data = b"".join(self.pieces)
        self.pieces = deque([data[: rng.randint(0, len(data))]])


@define(eq=False)
class Link:
    """One link between an API server and an engine."""

    session: Session
    down: Way  # to the API server
    up: Way = field(factory=Way)


@define(eq=False)
class Frontend:
    """An API server, its link, and what its requests got."""

    remote: RemoteEngine
    links: dict[int, Link] = field(factory=dict)  # by replica
    got: dict[SampleId, list[int]] = field(factory=dict)
    ended: dict[SampleId, Finished] = field(factory=dict)
    requested: dict[str, Request] = field(factory=dict)
    cut: dict[SampleId, int] = field(factory=dict)  # at which length it was told to end

    def hear(self, message: EngineMessage) -> None:
        """Keep what the engine said, and see that it makes sense."""
        assert isinstance(message, TurnOutputs), message
        for name, tokens in zip(message.ids, message.tokens, strict=True):
            assert not tokens or name not in self.ended or name in self.cut, name
            if name[0] in self.requested:
                self.got[name] += tokens
        for end in message.finished:
            name = (end.id, end.sample)
            assert name not in self.ended, f"{name} ended twice"
            self.ended[name] = end


@define(eq=False)
class Replica:
    """An engine's process, while there is one, and what it has come to."""

    number: int
    host: EngineServer | None = None
    compiling: CompilingRequests = field(factory=CompilingRequests)
    engine: Inline | None = None
    deaths: int = 0
    last_end: EndKind = EndKind.UNKNOWN


class World:
    """All of it; `poison` is a request that kills the engine that has it."""

    def __init__(
        self,
        seed: int,
        api_servers: int = 2,
        poison: str = "",
        kills: Poison | None = None,
        replicas: int = 1,
        policy: str = "prefix",
        prefillers: int = 0,
        elsewhere: int = 0,
    ) -> None:
        self.rng = Random(seed)
        self.prefillers = prefillers  # the first replicas compute prompts for others
        self.elsewhere = elsewhere  # so do the last, which are on other machines
        self.sent: dict[Key, list[list[int]]] = {}  # blocks, by content key
        self.fetched = 0
        self.now = 0.0
        self.poison = poison
        self.kills = kills or Poison(poison)
        self.numbers = count()
        self.replicas = [Replica(number) for number in range(replicas)]
        self.policy = policy
        # How often a request was served alone when an engine, or its link, was gone.
        self.solo = Counter[str]()
        self.beside = 0  # engines that died while they served others than the poison
        self.outages = 0  # deaths after which no engine was ready
        self.api_servers = [self._api_server(number) for number in range(api_servers)]
        for peer in self.replicas:
            self.born(peer)

    @property
    def deaths(self) -> int:
        """How many engines have died."""
        return sum(peer.deaths for peer in self.replicas)

    def clock(self) -> float:
        """The world's time."""
        return self.now

    # --- what happens -------------------------------------------------------------------

    def born(self, replica: Replica) -> None:
        """An engine starts, which is ready some time later."""
        api_servers = None if self.is_elsewhere(replica) else len(self.api_servers)
        size = self.config_of(replica).block_size
        replica.host = EngineServer(
            api_servers, lambda _: None, clock=self.clock, block_size=size
        )
        replica.engine = None

    def ready(self, replica: Replica) -> None:
        """The engine has loaded."""
        if replica.host is not None and replica.engine is None:
            executor = Poisoned(self.kills, self.sent)
            config = self.config_of(replica)
            driver = Driver(config, executor, clock=self.clock)
            replica.compiling = CompilingRequests()
            replica.engine = Inline(driver, grammars=replica.compiling)
            news = None
            if len(self.replicas) > 1:
                news = CacheEventPublisher(config, lambda: driver.state)
                replica.engine.turn_listeners = [self.watching(replica.host)]
            replica.host.open(replica.engine, READY, news)

    @property
    def apart(self) -> bool:
        """Whether some engines compute prompts for others."""
        return bool(self.prefillers or self.elsewhere)

    def is_elsewhere(self, replica: Replica) -> bool:
        """Whether an engine is on another machine."""
        return replica.number >= len(self.replicas) - self.elsewhere

    def config_of(self, replica: Replica) -> EngineConfig:
        """The configuration of an engine."""
        if not self.apart:
            return CONFIG
        gets = replica.number >= self.prefillers and not self.is_elsewhere(replica)
        num_known = 2 * CONFIG.num_blocks
        tier = ExternalStore(
            max_known_keys=num_known, push_only=True, choice=LOAD if gets else RECOMPUTE
        )
        return evolve(CONFIG, external_store=tier)

    def watching(self, host: EngineServer) -> Callable[[EngineState, Transition], None]:
        """Counts blocks that are fetched, beside what the host does with a turn."""

        def note(before: EngineState, turn: Transition) -> None:
            fetches = [
                command for command in turn.commands if isinstance(command, FetchBlocks)
            ]
            self.fetched += sum(len(fetch.keys) for fetch in fetches)
            host.note_turn(before, turn)

        return note

    def last_end(self, number: int) -> EngineEnd:
        """How the last engine of a replica ended that has ended."""
        replica = self.replicas[number]
        return EngineEnd(replica.last_end, replica.deaths)

    def kill(self, number: int = 0, end: EndKind = EndKind.KILLED) -> None:
        """An engine's process is gone, and with it all links; what it said before comes
        to those whose links hold until then.
        """
        replica = self.replicas[number]
        replica.deaths += 1
        replica.last_end = end
        engine, host = replica.engine, replica.host
        replica.host = replica.engine = None
        if engine is not None and host is not None:
            probing, served = host._quarantine.probing, engine.live.served().keys()
            if probing and served <= {probing}:
                self.solo[probing.split("#")[0]] += 1
            self.beside += any(request_of(name) != self.poison for name in served)
            self.outages += not any(peer.engine for peer in self.replicas)
        for api_server in self.api_servers:
            while (link := api_server.links.get(number)) and link.down:
                self._read_down(api_server, replica, link)
            self._cut(api_server, replica, reported=False)

    def link(self, api_server: Frontend, replica: Replica) -> None:
        """An API server makes a link, if there is an engine at the other end."""
        if replica.number in api_server.links or replica.host is None:
            return
        down = Way()
        link = Link(Session(down.say), down)
        api_server.links[replica.number] = link
        replica.host.join(link.session)
        api_server.remote.connect(
            lambda message: link.up.say(wire.encode(message)), replica.number
        )

    def ask(self, api_server: Frontend, request: Request) -> None:
        """A request comes."""
        api_server.requested[request.id] = request
        for sample in range(request.n):
            api_server.got[request.id, sample] = []
        api_server.remote.submit([request])

    def constrained(self, text: str) -> SamplingParams:
        """How it is asked for what has to be compiled."""
        return SamplingParams(structured_outputs=StructuredOutputs(regex=text))

    def any_request(self) -> Request:
        """One like others."""
        rng = self.rng
        prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 20)))
        free = SamplingParams(temperature=rng.choice((0, 1)))
        return Request(
            id=f"r{next(self.numbers)}",
            prompt=prompt,
            max_tokens=rng.randint(1, 40),
            n=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.randrange(2**63),
            sampling=self.constrained("fine") if rng.random() < BOUND else free,
            stop_ids=frozenset(rng.choices(range(VOCAB), k=rng.choice((0, 1)))),
            keys=block_keys(b"", prompt, CONFIG.block_size) if self.apart else (),
        )

    def move(self, *, hostile: bool) -> None:
        """Something happens."""
        self.now += STEP
        api_server, replica = (
            self.rng.choice(self.api_servers),
            self.rng.choice(self.replicas),
        )
        if replica.host is None:
            self.born(replica)
        friendly: list[Callable[[], object]] = [
            lambda: self.ready(replica),
            lambda: self.link(api_server, replica),
            lambda: self._up(api_server, replica),
            lambda: self._down(api_server, replica),
            lambda: self._turn(replica),
            lambda: self._compile(replica),
            lambda: self._tick(replica),
            lambda: api_server.remote.count(NO_TOTALS),
        ]
        bad: list[Callable[[], object]] = [
            lambda: self.kill(replica.number),
            lambda: self._cut(api_server, replica),
            lambda: self._spoil(api_server, replica),
            lambda: self._stall(api_server, replica),
            lambda: self._cancel(api_server),
            lambda: self._finish(api_server),
            self._lose,
        ]
        common: list[Callable[[], object]] = [
            lambda: self.ask(api_server, self.any_request())
        ]
        weights = [10, 40, 120, 120, 120, 40, 10, 2]
        if hostile:
            weights += [3, 2, 3, 3, 5, 5, 3 * self.apart, 20]
            friendly += bad + common
        self.rng.choices(friendly, weights)[0]()

    def run(self, moves: int) -> None:
        """Be hostile, then heal, and wait until everything has ended."""
        for _ in range(moves):
            self.move(hostile=True)
        for _ in range(MOST_MOVES):
            if all(not api_server.remote.working for api_server in self.api_servers):
                return
            self.move(hostile=False)
        left = [
            record.request.id
            for f in self.api_servers
            for record in f.remote._requests.all()
        ]
        raise AssertionError(f"not drained: {left}")

    # --- judgement ----------------------------------------------------------------------

    def judge(self) -> None:
        """Everybody got what they would get alone, and heard of its end once."""
        for api_server in self.api_servers:
            for request in api_server.requested.values():
                expected = solo(request)
                for sample in range(request.n):
                    self._judge(api_server, request, sample, expected[sample])

    def _judge(
        self, api_server: Frontend, request: Request, sample: int, right: tuple[int, ...]
    ) -> None:
        name = (request.id, sample)
        end, tokens = api_server.ended[name], tuple(api_server.got[name])
        if request.id == self.poison:
            killer = self.kills.sample in (None, sample)
            assert end.reason == "error" or (not killer and tokens == right), end
            assert tokens == right[: len(tokens)]
            return
        assert end.reason != "error", "whoever kills from outside, nobody is blamed"
        assert end.length <= len(tokens), (name, end, tokens)
        assert tokens[: end.length] == right[: end.length], (name, tokens, right)
        if end.reason in ("length", "stop") and name not in api_server.cut:
            assert tokens == right, (name, end)
            assert end.length == len(right)
        elif name in api_server.cut and end.reason == "cut":
            assert end.length <= api_server.cut[name]
        elif name not in api_server.cut:
            assert end.reason == "cancelled", end

    # --- how it happens -----------------------------------------------------------------

    def _api_server(self, number: int) -> Frontend:
        router = None
        if len(self.replicas) > 1:
            policy = routing_policy_named(self.policy)
            router = ApiServerRouter(RouterConfig(policy, CONFIG.block_size))
        count = len(self.replicas)
        prefill = None
        if self.apart:
            own = ApiServerRouter(RouterConfig(Prefix(), CONFIG.block_size))
            prefill = PrefillFirst(
                own, CONFIG.max_model_len, max_direct_tokens=CONFIG.block_size
            )
        remote = RemoteEngine(
            number,
            clock=self.clock,
            replicas=count - self.elsewhere,
            router=router,
            prefill=prefill,
            prefillers=self.prefillers,
            external=self.elsewhere,
            last_end=self.last_end,
        )
        api_server = Frontend(remote)
        api_server.remote.listen(api_server.hear)
        return api_server

    def _cut(
        self,
        api_server: Frontend,
        replica: Replica,
        *,
        reported: bool = True,
        by_api_server: bool = False,
    ) -> None:
        """A link is over; `reported`: the engine learns of it."""
        link = api_server.links.pop(replica.number, None)
        if link is None:
            return
        if reported and replica.host is not None:
            replica.host.leave(link.session)
            probing = api_server.remote.replicas[replica.number].probing
            self.solo[probing.split("#")[0]] += 1
        network = self.is_elsewhere(replica) and self.rng.random() < CUT
        api_server.remote.disconnect(replica.number, cut=network or by_api_server)

    def _up(self, api_server: Frontend, replica: Replica) -> None:
        link = api_server.links.get(replica.number)
        if link is not None and self.now >= link.up.stalled:
            self._read_up(api_server, replica, link)

    def _down(self, api_server: Frontend, replica: Replica) -> None:
        link = api_server.links.get(replica.number)
        if link is not None and self.now >= link.down.stalled:
            self._read_down(api_server, replica, link)

    def _read_up(self, api_server: Frontend, replica: Replica, link: Link) -> None:
        """Something arrives at the engine; what is no message ends the link."""
        if not link.up:
            return
        try:
            for message in link.up.arrive(self.rng):
                assert replica.host is not None
                replica.host.receive(link.session, wire.read_to_engine(message))
        except PeerError:
            self._cut(api_server, replica)

    def _read_down(self, api_server: Frontend, replica: Replica, link: Link) -> None:
        """Something arrives at the front; what is no message ends the link."""
        if not link.down:
            return
        try:
            for message in link.down.arrive(self.rng):
                api_server.remote.receive(
                    wire.read_to_api_server(message), replica.number
                )
        except PeerError:
            self._cut(api_server, replica, by_api_server=True)

    def _turn(self, replica: Replica) -> None:
        if replica.engine is not None:
            self._risk(replica, replica.engine.pump)

    def _compile(self, replica: Replica) -> None:
        if replica.engine is not None:
            self._risk(replica, lambda: replica.compiling.move(self.poison))

    def _risk(self, replica: Replica, action: Callable[[], object]) -> None:
        """Do what may kill the engine."""
        try:
            action()
        except Killed:
            self.kill(replica.number, self.kills.end)

    def _tick(self, replica: Replica) -> None:
        if replica.host is not None:
            replica.host.tick()

    def _spoil(self, api_server: Frontend, replica: Replica) -> None:
        """The link is cut at some byte of what is on its way, each way at another; or an
        end says what is no message.
        """
        link = api_server.links.get(replica.number)
        if link is None:
            return
        if self.rng.random() < GARBAGE:
            noise = self.rng.choice(NOISE)
            self.rng.choice((link.up, link.down)).pieces.append(noise)
            return
        for way, read in ((link.up, self._read_up), (link.down, self._read_down)):
            way.cut(self.rng)
            while way and api_server.links.get(replica.number) is link:
                read(api_server, replica, link)
        self._cut(api_server, replica)

    def _stall(self, api_server: Frontend, replica: Replica) -> None:
        """Nothing arrives at one end of a link for a while."""
        if (link := api_server.links.get(replica.number)) is not None:
            way = self.rng.choice((link.up, link.down))
            way.stalled = self.now + self.rng.random() * STALL

    def _lose(self) -> None:
        """A block that was sent is lost."""
        if self.sent:
            del self.sent[self.rng.choice(list(self.sent))]

    def _cancel(self, api_server: Frontend) -> None:
        names = [one for one in api_server.requested if one != self.poison]
        if names:
            api_server.remote.cancel([self.rng.choice(names)])

    def _finish(self, api_server: Frontend) -> None:
        """A sample is to end at some length that was reached, as at a stop string."""
        open_ = [
            name
            for name, tokens in api_server.got.items()
            if tokens and name not in api_server.ended and name not in api_server.cut
        ]
        if open_:
            name = self.rng.choice(open_)
            length = self.rng.randint(1, len(api_server.got[name]))
            api_server.cut[name] = length
            api_server.remote.finish([Finish(*name, length, "cut")])
