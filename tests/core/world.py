"""A small hostile world around the engine: requests, an oracle that executes, and an
auditor.

`World` offers macro actions (a burst of requests, k turns, a late result, a cancel, a
failed step) to the Hypothesis machine and to the swarm alike. After every turn it checks
the state and the turn; at a sample's end it compares what was emitted with `reference`.
"""

import math
from collections import Counter, deque
from itertools import islice
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.blocks.keys import block_keys, root_key
from minfer.blocks.window import outside
from minfer.engine import step
from minfer.policies.builtin import Ageing, Deadline, Priority, Shortest, Static, Window
from minfer.policies.fair_seats import FairSeats
from minfer.records.acceptance import Costs
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    DropAdapter,
    Emit,
    Event,
    Execute,
    Executed,
    Failed,
    Finish,
    Finished,
    LoadAdapter,
    Lost,
    Moved,
    Pause,
    Preempted,
    Propose,
    Submit,
    Tick,
    TransferCommand,
)
from minfer.records.policy import FirstCome, Load, Policy
from minfer.records.request import KvTransfer, PromptOnly, Request, SamplingParams
from minfer.records.sequence import SampleId
from minfer.records.speculation import DRAFTERS, HOST, Speculation
from minfer.records.state import EngineState, Transition, initial
from minfer.records.state_keeping import StateKeeping
from minfer.records.tiers import CHOICES, LOAD, ExternalStore, HostTier
from minfer.records.token_logprobs import unpack_parts
from minfer.simulation.oracle import INITIAL_DIGEST, ONE_GROUP, vector_of
from minfer.testing.invariants import check
from minfer.testing.ledger import Ledger, RecordingPolicy
from tests.core.executing import Busy, Habits
from tests.core.paths import taken
from tests.core.tuned import tiny, tuned

VOCAB = 40
BIG_SHARE = 0.01  # of worlds
CROWD = 64  # where more run at once, a turn takes long to check: worlds are kept short
CROWD_TOKENS = 48  # of a request there
CROWD_REQUESTS = 70  # that arrive at once there, at most


@frozen
class Sparing(FirstCome):
    """Takes fewer tokens a step the more wait."""

    def budget(self, _: Any, load: Load) -> int:
        return max(1, load.budget // (1 + load.waiting))


POLICIES: tuple[Policy, ...] = (
    FirstCome(),
    FirstCome(),
    FirstCome(),
    Priority(),
    Ageing(4.0, 2),
    Deadline(9.0),
    Shortest(0.3),
    FairSeats(least=2, newcomers=1),
    Window(4.0, 2, wait=1.5, fill=3, urgent=0),
    Static(2),
)


Groups = tuple[CacheGroup, ...]


def reference(
    request: Request,
    sample: int,
    block_size: int,
    vocab: int,
    limit: int,
    groups: Groups = ONE_GROUP,
) -> list[int]:
    """What a sample must yield, computed alone and without blocks.

    `limit` bounds prompt and output together.
    """
    noise = (request.seed, sample) if request.sampling.temperature > 0 else ()
    tokens, out = [*request.prompt, *request.output], list[int]()
    alone = Alone(block_size, groups, adapter_of(request))
    for position in range(min(len(request.prompt) + request.max_tokens, limit) - 1):
        alone.read(tokens[position])
        if position + 1 == len(tokens):
            tokens.append(alone.digest(*noise) % vocab)
            out.append(tokens[-1])
            if tokens[-1] in request.stop_ids:
                break
    return out


def adapter_of(request: Request) -> tuple[int, ...]:
    """The adapter of a request as the oracle has it, if there is one."""
    return (int(request.adapter, 16),) if request.adapter else ()


def read_before(
    full: list[int], group: CacheGroup, position: int, size: int
) -> list[int]:
    """Of the full blocks before `position` those that its query reads: of the window, and
    of sink tokens.
    """
    low = outside(position, group.window, size)
    read = enumerate(full)
    return [one for at, one in read if at >= low or at * size < group.sink_tokens]


@define
class Alone:
    """What an oracle computes of one sequence, without blocks."""

    block_size: int
    groups: Groups
    adapter: tuple[int, ...] = ()
    position: int = 0
    state: int = INITIAL_DIGEST  # of recurrent layers, if there are any
    blocks: Groups = field(init=False)  # groups that have any
    full: list[list[int]] = field(init=False)  # by group: digests of full blocks
    here: list[int] = field(init=False)  # by group: of the last block
    seen: list[int] = field(init=False)  # by group: of what its last token attends to

    def __attrs_post_init__(self) -> None:
        self.blocks = tuple(group for group in self.groups if not group.state)
        self.full, self.here, self.seen = [[] for _ in self.blocks], [], []

    @property
    def recurrent(self) -> tuple[int, ...]:
        """The state of recurrent layers, if there are any."""
        return () if self.blocks == self.groups else (self.state,)

    def read(self, token: int) -> None:
        """One more input."""
        size, position = self.block_size, self.position
        if position % size == 0:
            self.here = [INITIAL_DIGEST + g for g in range(len(self.blocks))]
        each = zip(self.blocks, self.full, strict=True)
        self.seen = [
            hash(tuple(read_before(full, group, position, size))) for group, full in each
        ]
        self.state = hash((self.state, token, position))
        read = *self.seen, *self.recurrent, *self.adapter
        self.here = [hash((here, token, position, *read)) for here in self.here]
        self.position += 1
        if self.position % size == 0:
            for full, here in zip(self.full, self.here, strict=True):
                full.append(here)

    def digest(self, *noise: int) -> int:
        """Of all that the last input attends to."""
        read = *self.seen, *self.here, *self.recurrent, *self.adapter
        return hash((*read, self.position, *noise))


@frozen
class Seen:
    """What a prompt comes to, computed alone and without blocks."""

    here: list[int]  # the digest of each position
    last: int  # of all that the last one attends to

    @classmethod
    def of(cls, request: Request, block_size: int, groups: Groups) -> "Seen":
        alone, every = Alone(block_size, groups, adapter_of(request)), list[int]()
        for token in request.prompt:
            alone.read(token)
            every.append(sum(alone.here))
        return cls(every, alone.digest())


def _without_output(request: Request, prompt_only: PromptOnly) -> Request:
    return evolve(
        request,
        prompt_only=prompt_only,
        max_tokens=0,
        n=1,
        output=(),
        needs_host_mask=False,
    )


def pooled_reference(
    request: Request, block_size: int, groups: Groups = ONE_GROUP
) -> bytes:
    """The vector of a prompt."""
    seen = Seen.of(request, block_size, groups)
    return vector_of(sum(seen.here) if request.pooling == "mean" else seen.last)


def scored_reference(
    request: Request, block_size: int, groups: Groups = ONE_GROUP
) -> list[int]:
    """What the oracle says of the tokens of a prompt, from the second on."""
    seen = Seen.of(request, block_size, groups)
    return [digest % 2**30 for digest in seen.here[:-1]]


def reported_ranks(data: bytes) -> list[int]:
    """What came of a prompt, from its second token on: no gaps, and what was said twice
    is the same.
    """
    reported: list[int] = []
    for at, one in unpack_parts(data, range(2**31)):
        assert 1 <= at <= len(reported) + 1, f"nothing came before {at}"
        if at > len(reported):
            reported.append(one.rank)
        assert reported[at - 1] == one.rank
    return reported


def tiny_config(rng: Random) -> EngineConfig:
    """Pools so small, and budgets so tight, that everything happens at once."""
    seqs = rng.randint(1, 6)
    size = rng.choice((1, 2, 4, 5))
    shrunk, longest = rng.random() < 0.8, rng.choice((16, 32, 48))
    just = -(
        -longest // size
    )  # blocks in which the longest request has room, and no other
    return EngineConfig(
        num_blocks=rng.randint(*rng.choice(((4, 12), (just, just + 4), (10, 40)))),
        block_size=size,
        max_model_len=longest,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, rng.choice((1, 2, 3, 5, 8, 16, 64))),
        vocab_size=VOCAB,
        depth=rng.choice((1, 2, 2, 3)),
        max_failures=rng.choice((2, 3)),
        watermark=rng.choice((0, 0, 1, 2)),
        late_masks=(seqs + size) % 3 > 0,  # not drawn: seeds keep their worlds
        scored_cost=1 + (seqs + size) % 2,
        max_waiting=rng.choice((2**20, 2**20, 6)),
        policy=rng.choice(
            (
                *POLICIES,
                Priority(),
                Priority(),
                Sparing(),
                FairSeats(clients=2, least=1, newcomers=2),
                FairSeats(clients=1, least=1, newcomers=1),
            )
        ),
        groups=(with_sinks(rng.choice((0, 0, 0, 2, 3, 6, 9, 14)), seqs + size),),
        freed_run=rng.choice((1, 2, 3)) if shrunk else 64,
    )


def with_sinks(window: int, salt: int, pages: int = 1) -> CacheGroup:
    """A group with a window and, by a number that is not drawn so that seeds keep their
    worlds, up to as many sink tokens.
    """
    sinks = (0, 1, 2, window // 2, window)[salt % 5] if window else 0
    return CacheGroup(window, pages, sinks)


def several_groups(config: EngineConfig, rng: Random) -> EngineConfig:
    """`config`, or with layers of several groups, in a pool of up to as many blocks."""
    (one,) = config.groups
    if rng.random() < 0.5:
        return config
    window = one.window or rng.choice((2, 3, 6, 9, 14))
    salt = config.max_num_seqs + config.block_size
    sunk = with_sinks(window, salt)
    groups = rng.choice(
        (
            (CacheGroup(), sunk),
            (CacheGroup(), with_sinks(window, salt, pages=2)),
            (with_sinks(window, salt, pages=3), CacheGroup()),
            (CacheGroup(window), CacheGroup(pages=2), with_sinks(window + 5, salt)),
            (sunk, CacheGroup(window + 3, pages=2)),
            (with_sinks(window, salt, pages=2),),
        )
    )
    pages = sum(group.pages for group in groups)
    most = config.num_blocks * pages
    few = min(
        most,
        evolve(config, groups=groups).most_pages(
            -(-config.max_model_len // config.block_size)
        ),
    )
    return evolve(
        config, groups=groups, num_blocks=rng.choice((most, rng.randint(few, most)))
    )


def with_states(
    config: EngineConfig, rng: Random, *, always: bool = False
) -> EngineConfig:
    """`config`, or with recurrent layers, and up to a state more for each row; `always`:
    with them.
    """
    if rng.random() < 0.6 and not always:
        return config
    pages, rows = rng.choice((1, 1, 2, 3, 5)), config.max_num_seqs
    groups = (*config.groups, CacheGroup(state=True, pages=pages))
    more = pages * rng.choice((1, rng.randint(1, rows + 1), 2 * rows))
    keeping = StateKeeping(
        stride_blocks=rng.choice((0, 1, 2, 16)),
        decode_stride_blocks=rng.choice((0, 1, 1, 2)),
        max_share=rng.choice((0.0, 0.3, 0.6, 1.0, 1.0)),
    )
    # Not drawn: seeds keep their worlds.
    few = 1 + (rows + pages) % 3 * pages
    keeping = evolve(keeping, max_saved_pages=few) if (rows + more) % 2 else keeping
    keeping = evolve(keeping, every_prompt=config.num_blocks % 5 > 0)
    keeping = evolve(keeping, inside_from=(0, 1, 2, 9)[config.num_blocks % 4])
    return evolve(
        config, groups=groups, num_blocks=config.num_blocks + more, states=keeping
    )


def big_config(rng: Random) -> EngineConfig:
    """A pool of hundreds of blocks, long lines and prompts, and token ids of more than 16
    bits.
    """
    seqs = rng.choice((8, 24, 72))
    return EngineConfig(
        num_blocks=rng.randint(200, 600)
        * (6 if seqs > CROWD else 1),  # they shall run at once
        block_size=rng.choice((1, 2)),
        max_model_len=160,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice((128, 512)),
        vocab_size=rng.choice((VOCAB, 2**17, 2**31)),
        depth=rng.choice((1, 2)),
        policy=rng.choice(POLICIES),
        groups=(CacheGroup(rng.choice((0, 0, 0, 50))),),
        freed_run=rng.choice((64, 3)),
    )


def some_speculation(rng: Random) -> Speculation | None:
    """Drafts of the host, of the device, or none."""
    if rng.random() < 0.5:
        return None
    sizes = sorted(rng.sample(range(1, 40), rng.randint(1, 6)))
    seconds = sorted(rng.uniform(1, 2) for _ in sizes)
    costs = Costs(
        tuple(zip(sizes, seconds, strict=True)),
        draft=rng.choice((0.0, 0.1)),
        fixed=rng.choice((0.0, 0.2)),
    )
    return Speculation(
        drafter=rng.choice(DRAFTERS),
        drafts=rng.choice((1, 2, 4)),
        rows=rng.choice((0, 0, 0, 2)),
        adaptive=rng.random() < 0.4,
        costs=costs,
    )


def speculating(config: EngineConfig, rng: Random) -> EngineConfig:
    """`config` with drafts, or not; some budgets have room for them."""
    how = some_speculation(rng)
    if how is not None and len(config.block_groups) > 1:  # no draft model
        how = evolve(how, drafter=HOST)
    room = rng.choice((0, how.drafts, 8 * how.drafts)) if how else 0
    budget = config.max_num_batched_tokens + room
    return evolve(config, speculation=how, max_num_batched_tokens=budget)


def with_host(config: EngineConfig, rng: Random) -> EngineConfig:
    """`config`, or with host memory under the pool: smaller, or larger."""
    if rng.random() < 0.6:
        return config
    many = 4 * config.num_blocks
    few = max(config.block_pages, config.state_pages)
    pages = rng.choice((few, config.num_blocks, many, many))
    host = HostTier(pages=pages, **tier_costs(config, rng))
    return evolve(config, host=host)


def with_external_store(config: EngineConfig, rng: Random) -> EngineConfig:
    """`config`, or with an external store."""
    if rng.random() < 0.7:
        return config
    known = config.num_blocks * rng.choice((2, 3, 100))
    external = ExternalStore(
        max_known_keys=known, push_only=rng.random() < 0.3, **tier_costs(config, rng)
    )
    return evolve(config, external_store=external)


def with_adapters(
    config: EngineConfig, rng: Random, *, always: bool = False
) -> EngineConfig:
    """`config`, or with slots for adapters; `always`: with them."""
    if rng.random() < 0.6 and not always:
        return config
    return evolve(config, adapter_slots=rng.choice((1, 1, 2, 2, 3, 6)))


def with_itl_target(config: EngineConfig, rng: Random) -> EngineConfig:
    """`config`, or with a target for the time between tokens."""
    if rng.random() < 0.5:
        return config
    target, least = rng.choice((0.0, 0.1, 1.0, 3.0)), rng.choice((1, 1, 2, 4, 64))
    return evolve(config, itl_target=target, min_prefill_tokens=least)


def tier_costs(config: EngineConfig, rng: Random) -> dict[str, Any]:
    """What all tiers have in common. A large pool is not stored block by block, which
    would go on long after the last request.
    """
    return {
        "storing": max(
            rng.choice((1, 3, 512)), config.num_blocks // 100, config.state_pages
        ),
        "choice": rng.choice((*CHOICES, LOAD)),
        "load_seconds": rng.choice((0.0, 3.0)),
        "page_seconds": 0.1,
        "token_seconds": rng.choice((0.1, 1.0)),
    }


@define
class World:
    """The engine, its oracle, and everything that was ever said about each sample."""

    config: EngineConfig
    rng: Random
    habits: Habits = field(factory=Habits)
    bound: float = 0.0  # share of requests that never run ahead
    pausing: float = 0.0  # how often the host is late with a mask, or has it, in a turn
    proposing: float = 0.7  # how often the host drafts for a sample, if it does at all
    pooled: float = 0.0  # share of requests that end with their prompts
    moving: float = 0.5  # how often a transfer ends in a turn
    losing: float = 0.0  # share of transfers that are lost
    adapted: float = 0.0  # share of requests with an adapter
    num_adapters: int = 1  # that they have
    failing: float = 0.0  # share of loads of adapters that fail
    state: EngineState = field(init=False)
    oracle: Busy = field(init=False)
    ledger: Ledger = field(init=False)
    watched: EngineConfig = field(
        init=False
    )  # `config`, and what its policy answers: `budgets`
    budgets: list[int] = field(init=False)
    held_back: set[str] = field(init=False)  # of whom it said that others pass them
    inbox: list[Event] = field(factory=list)
    requests: dict[str, Request] = field(factory=dict)
    out: dict[SampleId, list[int]] = field(factory=dict)
    vectors: dict[SampleId, bytes] = field(factory=dict)
    ended: dict[SampleId, Finished] = field(factory=dict)
    cut: set[SampleId] = field(factory=set)
    past: deque[tuple[int, ...]] = field(
        factory=lambda: deque(maxlen=8)
    )  # prompts to share
    clock: float = 0.0
    turns: int = 0
    preempted: int = 0
    named: int = 0  # ids given
    big: bool = False  # its requests are long
    common: tuple[int, ...] = ()  # what the prompts of a burst begin with
    hungry: bool = False  # its outputs are long, so that blocks run out
    shuffled: bool = False  # what the next turn takes comes in any order
    paths: Counter[str] = field(factory=Counter)  # of module paths, and how often
    audit: bool = True
    poisonous: float = 0.0  # share of requests whose every step fails
    poison: set[str] = field(factory=set)
    failed: set[str] = field(
        factory=set
    )  # adapters that could not be loaded at some time
    faults: int = 0  # steps that failed or were garbled for no fault of a request

    def __attrs_post_init__(self) -> None:
        self.state = initial(self.config)
        self.ledger = Ledger(self.config, self.state)
        policy: Any = RecordingPolicy(self.config.policy)
        self.budgets, self.watched = policy.budgets, evolve(self.config, policy=policy)
        self.held_back = policy.deferred
        sizes = self.config.block_size, self.config.vocab_size, self.config.groups
        self.oracle = Busy(self.habits, *sizes)

    # --- actions ------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.inbox.append(Submit(request))

    def burst(self, count: int) -> None:
        """Some requests arrive: related prompts, lengths at block ends,
        several samples.
        """
        self.common = self._prompt() if self.rng.random() < 0.4 else ()
        for _ in range(count):
            self.submit(self.some_request())
        self.common = ()

    def some_request(self) -> Request:
        """A request that has much in common with those before it."""
        rng, size = self.rng, self.config.block_size
        name, salt = self._name(), rng.choice((b"", b"", b"", b"other"))
        adapter = self._some_adapter(name)
        root, prompt = root_key(b"tests", salt, adapter), self._prompt()
        if rng.random() < self.poisonous:
            self.poison.add(name)
        n = rng.choice((1, 1, 1, 2, 4))
        output = self._tokens(rng.choice((0, 0, 0, 0, 1, 3))) if n == 1 else ()
        keys = block_keys(root, prompt, size)  # the edge may know some of them
        most = rng.choice((40, 12, 2 * size, *(() if self.hungry else (1, 2, 3, size))))
        request = Request(
            id=name,
            prompt=prompt,
            max_tokens=CROWD_TOKENS if self.config.max_num_seqs > CROWD else most,
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 2)))),
            n=n,
            seed=rng.randrange(4),
            sampling=SamplingParams(temperature=rng.choice((0.0, 1.0))),
            priority=rng.randint(0, 2),
            client=rng.choice(("", "a", f"c{rng.randrange(9)}")),
            deadline=rng.choice((math.inf, 2.0, 20.0)),
            root=root,
            keys=keys[: rng.choice((0, 0, len(keys), rng.randint(0, len(keys))))],
            output=output,
            needs_host_mask=self.bound > 0 and Random(name).random() < self.bound,
            taken=Random(f"taken {name}").random() < 0.1,
            adapter=adapter,
        )
        return self._pooled(self._stored(request))

    def _some_adapter(self, name: str) -> str:
        """An adapter, or none: some of a few, so that several requests have the same.
        Draws of its own: seeds keep their worlds.
        """
        rng = Random(f"adapter {name}")
        if not self.adapted or rng.random() >= self.adapted:
            return ""
        return f"{0xA0 + rng.randrange(self.num_adapters):x}"

    def _stored(self, request: Request) -> Request:
        """What is said of the external store: nothing, the truth, or anything."""
        rng, size = Random(f"stored {request.id}"), self.config.block_size
        if self.config.external_store is None or rng.random() < 0.4:
            return request
        keys = block_keys(request.root, request.prompt, size)
        true = sum(key in self.oracle.outside for key in keys)
        stored = rng.choice((true, true, len(keys), rng.randint(0, 9)))
        push_to = rng.choice(("", "", "other"))
        first = rng.choice((0, 0, rng.randint(0, 5)))
        if not (stored or push_to):
            return request
        transfer = KvTransfer(
            num_stored_blocks=stored, push_to=push_to, first_block=first
        )
        return evolve(request, kv_transfer=transfer)

    def _pooled(self, request: Request) -> Request:
        """Some requests end with their prompts."""
        rng = Random(f"pooled {request.id}")
        if not self.pooled or rng.random() >= self.pooled:
            return request
        how = rng.choice(("last", "mean"))
        if rng.random() < 0.5:
            return self._scored(request, rng)
        return _without_output(request, PromptOnly(how))

    def _scored(self, request: Request, rng: Random) -> Request:
        """Some requests have the tokens of their prompts scored, and some end with
        these.
        """
        kind = rng.choice(("scored", "scored", "both", "fills the cache"))
        if kind != "fills the cache":
            sampling = evolve(request.sampling, prompt_logprobs=0)
            request = evolve(request, sampling=sampling)
        return request if kind == "scored" else _without_output(request, PromptOnly())

    def _name(self) -> str:
        """A new id, or one whose samples have all ended."""
        if self.rng.random() < 0.05:
            used = {name for name, _ in self.ended} - self.requests_open()
            if used:
                name = self.rng.choice(sorted(used))
                for sample in range(self.requests[name].n):
                    self.ended.pop((name, sample), None)
                    self.cut.discard((name, sample))
                self.poison.discard(name)
                self.paths["id used anew"] += 1
                return name
        self.named += 1
        return f"r{self.named}"

    def requests_open(self) -> set[str]:
        """Ids that are served, or about to be."""
        coming = {event.request.id for event in self.inbox if isinstance(event, Submit)}
        return coming.union(self.state.requests)

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Token ids; of a large vocabulary, such as differ in their high bits only."""
        rng, vocab = self.rng, self.config.vocab_size
        tokens = (rng.randrange(VOCAB) for _ in range(count))
        high = range(0, vocab - VOCAB, 2**16) if vocab > 2**16 else range(1)
        return tuple(token + rng.choice(high[:3]) for token in tokens)

    def _prompt(self) -> tuple[int, ...]:
        """A prompt of some blocks, often the beginning of an earlier one and
        a bit more.
        """
        rng, size = self.rng, self.config.block_size
        blocks = rng.randint(0, 4)
        if self.big and self.hungry:  # else there are many
            crowd = (
                self.config.max_num_seqs > CROWD
            )  # they run at once if their prompts are short
            blocks = rng.choice((0, 0, 3) if crowd else (0, 3, 20, 40, 60))
        prompt = self._tokens(max(1, blocks * size + rng.choice((-1, 0, 0, 1, 2))))
        if self.common:  # all of a burst begin alike
            return self.common + prompt[: rng.choice((0, 0, 1, 2))]
        if self.past and rng.random() < 0.6:
            base = rng.choice(self.past)
            keep = rng.choice(
                (len(base), len(base) // size * size, rng.randint(1, len(base)))
            )
            prompt = base[:keep] + prompt[: rng.randint(0, len(prompt))]
            if (
                prompt and self.config.vocab_size > 2**16 and rng.random() < 0.3
            ):  # one bit differs
                at = rng.randrange(len(prompt))
                prompt = (*prompt[:at], prompt[at] ^ 2**16, *prompt[at + 1 :])
        if prompt:
            self.past.append(prompt)
        return prompt

    def cancel_some(self) -> None:
        """Cancel any request: waiting, running, ended or unknown."""
        ran = [name for name, _ in self.state.running.ids]  # once for each sample
        names = [*sorted(self.state.requests), *ran, *list(self.requests)[-3:], "unknown"]
        self.inbox.append(Cancel(self.rng.choice(names)))

    def finish_some(self) -> None:
        """The text layer ends a sample at some length, one that has ended or never was as
        well.
        """
        line = list(islice(self.state.waiting, 20))
        back = [seq.id for seq in line if seq.preempted] * 4
        names = [*self.out, *self.state.running.ids, *(seq.id for seq in line), *back]
        if names:
            name, sample = self.rng.choice(names)
            sample += self.rng.choice((0, 0, 0, 0, 0, 1, -1))
            length = self.rng.randint(-1, len(self.out.get((name, sample), ())) + 3)
            self.cut.add((name, sample))
            self.inbox.append(
                Finish(name, sample, length, self.rng.choice(("stop", "tool")))
            )

    def pause_some(self) -> None:
        """The host is late with the masks of some samples, and has those of others: of
        any, and of some that wait for none. Draws of its own: seeds keep their worlds.
        """
        rng = Random(f"pause {self.turns}")
        line = list(islice(self.state.waiting, 20))
        names = [*self.state.running.ids, *(seq.id for seq in line)]
        names += [("unknown", 0), *islice(self.ended, 1)]
        for _ in range(rng.choice((1, 1, 3))):
            if rng.random() < self.pausing:
                name, sample = rng.choice(names)
                self.inbox.append(Pause(name, sample))
        for one in sorted(self.state.paused):
            if rng.random() < 0.25:
                self.inbox.append(Pause(*one, paused=False))

    def propose_some(self, results: tuple[Event, ...]) -> list[Event]:
        """What the host drafts for some samples behind the results of this turn: mostly
        right, and sometimes for unknown samples, behind other tokens, or nothing at all.
        Draws of its own: seeds keep their worlds.
        """
        rng, run = Random(f"propose {self.turns}"), self.state.running
        found = list[Event]()
        known = dict(zip(run.ids, run.known, strict=True))
        for event in results:
            if isinstance(event, Executed) and type(event.yields) is tuple:
                plan = self.state.inflight[0]
                names = dict(zip(run.run_ids, run.ids, strict=True))
                for gen, tokens in zip(plan.run_ids, event.yields, strict=False):
                    if gen in names and isinstance(tokens, tuple):
                        known[names[gen]] += len(tokens)
        for name, count in [*known.items(), (("unknown", 0), 3), *self._ended_one()]:
            if rng.random() < self.proposing:
                count += rng.choice((0, 0, 0, 0, 0, 0, 0, 1, -1))
                whole = self._whole(name) if name in run.ids else (1,) * 9
                emitted = [
                    token if rng.random() < 0.7 else rng.randrange(VOCAB)
                    for token in whole[max(0, count) :][: rng.randint(0, 5)]
                ]
                if emitted and rng.random() < 0.02:
                    emitted[-1] = self.config.vocab_size
                found.append(Propose(*name, count, tuple(emitted)))
        return found

    def finish_moves(self) -> list[Event]:
        """Ends of transfers: late, in any order, some of them lost, some told twice, and
        some of none. Draws of its own: seeds keep their worlds.
        """
        rng, found = Random(f"moves {self.turns}"), list[Event]()
        outside = self.oracle.outside
        while outside and rng.random() < self.losing:  # others remove what they like
            del outside[rng.choice([*outside])]
        while self.oracle.moves and rng.random() < self.moving:
            at = rng.randrange(len(self.oracle.moves))
            error = "boom" if rng.random() < self.losing else ""
            self.oracle.seen["lost" if error else "moved"] += 1
            found.append(self.oracle.finish_move(at, error))
        if self.config.has_tiers and rng.random() < 0.05:
            odd: tuple[Any, ...] = (*found[:1], Moved(10**6), Lost(-1), Moved("x"))  # type: ignore[arg-type]
            found.append(rng.choice(odd))
        return found

    def finish_loads(self) -> list[Event]:
        """Ends of loads of adapters: late, in any order, some of them failed, some told
        twice, and some of none; and adapters that are dropped. Draws of its own: seeds
        keep their worlds.
        """
        rng, found = Random(f"loads {self.turns}"), list[Event]()
        while self.oracle.loads and rng.random() < self.moving:
            at = rng.randrange(len(self.oracle.loads))
            error = "boom" if rng.random() < self.failing else ""
            self.oracle.seen["adapter failed" if error else "adapter loaded"] += 1
            if error:
                self.failed.add(self.oracle.loads[at].adapter)
            found.append(self.oracle.finish_load(at, error))
        if rng.random() < 0.1:
            odd: tuple[Any, ...] = (
                *found[:1],
                AdapterLoaded("a0", 10**6),
                AdapterLoaded("b", 0),
                AdapterFailed("a0", -1),
                AdapterFailed("b", "x"),  # type: ignore[arg-type]
                DropAdapter("b"),
                DropAdapter(f"{0xA0 + rng.randrange(self.num_adapters):x}"),
                DropAdapter(f"{0xA0 + rng.randrange(self.num_adapters):x}"),
            )
            found.append(rng.choice(odd))
        return found

    def _ended_one(self) -> list[tuple[SampleId, int]]:
        return [(name, 3) for name in islice(self.ended, 1)]

    def submit_again(self) -> None:
        """A request is submitted once more: it is being served, or was, or has just
        ended.
        """
        live = [*sorted(self.state.requests), *list(self.requests)[-2:]]
        if live:
            request = self.requests[self.rng.choice(live)]
            if request.id in self.state.requests:
                self.inbox.append(Submit(request))

    def storm(self) -> None:
        """Several things happen to several requests in one turn, and its step fails, or
        does not.

        In any order: the first results of the turn may come between two cancels.
        """
        for _ in range(self.rng.randint(2, 5)):
            kinds = (self.cancel_some, self.finish_some, self.submit_again, self.noise)
            self.rng.choice(kinds)()
        self.shuffled = True
        self.rng.choice((self.turn, self.fail, self.garble, self.late))()

    def turn(self) -> None:
        """One turn in which the earliest step in flight completes, or fails if it is
        poisoned.
        """
        if self._poisoned():
            return self._take(
                (self.oracle.fail("poison", halfway=self.rng.random() < 0.5),)
            )
        return self._take((self.oracle.collect(),) if self.oracle.plans else ())

    def late(self) -> None:
        """One turn in which no result has come yet."""
        self._take(())

    def fail(self) -> None:
        """One turn in which the earliest step fails, having written something
        or nothing.
        """
        if not self.oracle.plans:
            return self.late()
        self.faults += 1
        return self._take((self.oracle.fail("boom", halfway=self.rng.random() < 0.5),))

    def _poisoned(self) -> bool:
        """Whether a sequence whose every step fails has a row in the earliest step in
        flight.
        """
        run = self.state.running
        api_server = self.oracle.plans[0].run_ids if self.oracle.plans else ()
        bad = (
            gen
            for gen, (name, _) in zip(run.run_ids, run.ids, strict=True)
            if name in self.poison
        )
        return any(gen in api_server for gen in bad)

    def garble(self) -> None:
        """One turn with results that cannot be: the step counts as failed."""
        if not self.oracle.plans or self._poisoned():
            return self.turn()
        self.faults += 1
        done = self.oracle.collect()
        assert isinstance(done, Executed)
        wrong: list[Event] = [
            Executed(done.step, (*done.yields, (1,))),
            Executed(done.step, tuple((*y, *[1] * 9) for y in done.yields)),
            Executed(
                done.step, tuple((self.config.vocab_size,) * len(y) for y in done.yields)
            ),
            Executed(done.step, tuple((-1,) * len(y) for y in done.yields)),
            Failed(done.step, "x" * 1000),
            Executed(done.step, tuple(list(y) for y in done.yields)),  # type: ignore[misc]
            Executed(done.step, tuple(("one",) * len(y) for y in done.yields)),  # type: ignore[misc]
            Executed(done.step, None),  # type: ignore[arg-type]
            Failed(done.step, None),  # type: ignore[arg-type]
        ]
        if self.state.inflight[1:]:
            wrong += [Executed(self.state.inflight[-1].step, done.yields)] * 3
        event = self.rng.choice(wrong)
        if (
            event != done
        ):  # a plan of rows that yield nothing cannot be garbled by more tokens
            self.oracle.plans.clear()
            for index in {row for plan in self.state.inflight for row in plan.rows}:
                if index in self.oracle.rows:
                    self.oracle.rows[index].last = self.oracle.rows[index].next = -1
        else:
            event = done  # with the vectors that its equal lacks
        return self._take((event,))

    def noise(self) -> None:
        """Results and failures of unknown steps, and what is no
        event at all.
        """
        known = self.state.next_step
        odd: tuple[Any, ...] = (
            Executed(known + 3, ()),
            Failed(known + 3),
            Executed("0", ((1,),)),  # type: ignore[arg-type]
            Failed(-1, None),  # type: ignore[arg-type]
            Tick(-1.0),
            None,
            ("Cancel", "r0"),
        )
        self.inbox.append(self.rng.choice(odd))

    def drain(self) -> None:
        """No more arrivals and no more faults: everything must end, in bounded time."""
        work = sum(
            (len(r.prompt) + min(r.max_tokens, self.config.max_model_len)) * r.n
            for r in self.requests.values()
            if r.id in self.state.requests or any(Submit(r) == e for e in self.inbox)
        )
        work += sum(5 * self.requests[name].n for name in self.poison)
        bound = self.turns + 50 + 4 * work
        self.pausing = 0.0  # every mask comes
        self.moving = 1.0
        while (
            self.state.requests
            or self.state.inflight
            or self.inbox
            or self.oracle.moves
            or self.oracle.loads
        ):
            reported = {(e.id, e.sample) for e in self.inbox if isinstance(e, Pause)}
            for name in sorted(self.state.paused | reported):
                self.inbox.append(Pause(*name, paused=False))
            assert self.turns < bound, f"not drained: {self.state.blocked}"
            self.turn()
        check(self.config, self.state)
        assert self.state.blocks.available == self.config.num_blocks
        lost = {(r.id, s) for r in self.requests.values() for s in range(r.n)} - set(
            self.ended
        )
        assert not lost, f"no terminal word about {lost}"

    # --- the auditor --------------------------------------------------------------------

    def _take(self, results: tuple[Event, ...]) -> None:
        self.turns += 1
        if self.pausing:
            self.pause_some()
        self.clock += self.rng.random()
        reported = [*results, *self.inbox]
        how = self.config.speculation
        if how is not None and how.drafter == HOST:
            reported += self.propose_some(results)
        if self.shuffled:
            self.rng.shuffle(reported)
            self.shuffled = False
        reported += self.finish_moves()
        if self.config.adapter_slots:
            reported += self.finish_loads()
        events = (Tick(self.clock), *reported)
        self.inbox.clear()
        self.budgets.clear()
        self.held_back.clear()
        before, turn = self.state, step(self.watched, self.state, events)
        self.state = turn.state
        if self.audit:
            self.ledger.take(events, turn, self.budgets, self.held_back)
            self.paths += taken(self.config, before, events, turn)
        self.preempted += sum(isinstance(r, Preempted) for r in turn.reasons)
        self._perform(turn)

    def _perform(self, turn: Transition) -> None:
        for command in turn.commands:
            if isinstance(command, Execute):
                self.oracle.launch(command.plan)
            elif isinstance(command, TransferCommand):
                self.oracle.move(command)
                self.oracle.seen[command.kind] += 1
            elif isinstance(command, LoadAdapter):
                self.oracle.load_adapter(command)
            elif isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    self.out.setdefault(name, []).extend(tokens)
                if command.pooled:
                    each = zip(command.ids, command.pooled, strict=True)
                    for name, emitted in each:
                        if emitted:
                            self.vectors[name] = self.vectors.get(name, b"") + emitted
                for done in command.finished:
                    self._end(done)

    def _end(self, done: Finished) -> None:
        name = (done.id, done.sample)
        self.ended[name] = done
        request, out = self.requests[done.id], self.out.pop(name, [])
        vector = self.vectors.pop(name, b"")
        before = len(request.output)  # it was resumed with so many
        if done.reason == "rejected":
            assert not out
            assert done.error
            return
        if request.pooling:
            self._end_pooled(done, request, out, vector)
            return
        self._check_scored(done, request, vector)
        if done.reason == "error" and request.adapter in self.failed:
            self.paths["adapter failed"] += 1
        elif done.reason == "error" and not self.faults:
            assert done.id in self.poison, f"{name} is blamed for its neighbours"
        right = self.reference(request, done.sample)
        if done.reason in ("stop", "length") and name not in self.cut:
            assert out == right, f"{name}: {out} is not {right}"
            assert done.length == before + len(out), (
                f"{name}: {done.length} tokens, {out} emitted"
            )
            stopped = request.max_tokens > 0 and out[-1] in request.stop_ids
            assert done.reason == ("stop" if stopped else "length")
        else:
            assert out == right[: len(out)], f"{name}: {out} does not begin {right}"
            assert done.length <= before + len(out)
        whole = (*request.prompt, *request.output, *right)
        self.past.append(whole[: len(request.prompt) + done.length])

    def _check_scored(self, done: Finished, request: Request, emitted: bytes) -> None:
        """Each token of its prompt was told of, if asked for: once for all samples."""
        once = done.sample == 0 and not request.output
        if request.sampling.prompt_logprobs is None or not once:
            assert not emitted
            return
        due = scored_reference(request, self.config.block_size, self.config.groups)
        reported = reported_ranks(emitted)
        whole = done.reason in ("stop", "length") and (done.id, 0) not in self.cut
        assert reported == (due if whole else due[: len(reported)])
        self.paths["scored"] += whole

    def _end_pooled(
        self, done: Finished, request: Request, out: list[int], vector: bytes
    ) -> None:
        """It ends with the vector of its prompt, and has it only if it has ended so."""
        assert not out
        assert done.length == 0
        size, groups = self.config.block_size, self.config.groups
        due = pooled_reference(request, size, groups) if done.reason == "length" else b""
        assert vector == due, f"{done}: {vector!r} is not {due!r}"
        self.paths[f"pooled: {request.pooling}"] += bool(vector)

    def _whole(self, name: SampleId) -> tuple[int, ...]:
        request = self.requests[name[0]]
        return (*request.prompt, *request.output, *self.reference(request, name[1]))

    def reference(self, request: Request, sample: int) -> list[int]:
        own = self.config
        size, limit = own.block_size, own.max_model_len
        return reference(request, sample, size, own.vocab_size, limit, own.groups)


def run_swarm(
    seed: int, turns: int, *, states: bool = False, adapters: bool = False
) -> World:
    """One world, with thresholds of its own; `states`: with recurrent layers, `adapters`:
    with slots for adapters.
    """
    rng = Random(f"thresholds {seed}")
    with tuned(**tiny(rng) if rng.random() < 0.8 else {}):
        return run_world(seed, turns, states=states, adapters=adapters)


def run_world(
    seed: int, turns: int, *, states: bool = False, adapters: bool = False
) -> World:
    """One world under random fire for `turns` turns, healed and drained; `states`: with
    recurrent layers in any case, `adapters`: with slots for adapters.
    """
    rng = Random(seed)
    big = rng.random() < BIG_SHARE
    config = big_config(rng) if big else tiny_config(rng)
    config = several_groups(config, Random(f"groups {seed}"))
    config = with_states(config, Random(f"states {seed}"), always=states)
    config = speculating(config, Random(f"speculation {seed}"))
    config = with_host(config, Random(f"host {seed}"))
    config = with_external_store(config, Random(f"external {seed}"))
    config = with_adapters(config, Random(f"adapters {seed}"), always=adapters)
    config = with_itl_target(config, Random(f"itl {seed}"))
    world = World(config, rng)
    separate = Random(
        seed
    )  # what executors do besides changes nothing of the world itself
    world.oracle.habits = Habits(
        wire=separate.random() < 0.2,
    )
    world.bound = 0.3 if separate.random() < 0.15 else 0.0
    if config.speculation is not None and Random(f"bound {seed}").random() < 0.3:
        world.bound = 0.4
    if world.bound:
        world.pausing = Random(f"pausing {seed}").choice((0.0, 0.2, 0.6))
    own = Random(f"moving {seed}")
    world.moving, world.losing = own.choice((0.1, 0.5, 0.9)), own.choice((0.0, 0.0, 0.2))
    own = Random(f"adapted {seed}")
    if config.adapter_slots or own.random() < 0.05:
        world.adapted = own.choice((0.3, 0.7, 1.0))
        world.num_adapters = own.choice((1, 2, 3, 3, 5, 9))
        world.failing = own.choice((0.0, 0.0, 0.2))
    world.pooled = 0.4 if separate.random() < 0.25 else 0.0
    world.big, world.hungry, world.poisonous = (
        big,
        rng.random() < 0.6,
        rng.choice((0.0, 0.1)),
    )
    crowd = config.max_num_seqs > CROWD
    if crowd:  # each step that fails has all of them run alone, one after the other
        world.poisonous = 0.0
    # Swarm testing: each run leaves out some kinds of trouble, so that others get
    # further.
    trouble = [
        a
        for a, share in (
            (world.fail, 0.5),
            (world.garble, 0.3),
            (world.cancel_some, 0.7),
            (world.finish_some, 0.4),
            (world.late, 0.6),
            (world.noise, 0.3),
            (world.submit_again, 0.3),
            (world.storm, 0.4),
        )
        if rng.random() < share
    ]
    rate, often = rng.choice((0.05, 0.2, 0.5)), rng.choice((0.05, 0.15, 0.3))
    ends = world.turns + (turns // 3 if big else turns)
    if big:
        count = rng.choice((20, 90, 150))
        world.burst(min(count, CROWD_REQUESTS) if crowd else count)
    while world.turns < ends:
        if rng.random() < rate and len(world.state.waiting) < 12:
            world.burst(rng.choice((1, 1, 2, 5)))
        if trouble and rng.random() < often:
            rng.choice(trouble)()
        world.turn()
    world.drain()
    world.paths += world.oracle.seen
    return world


__all__ = [
    "VOCAB",
    "World",
    "big_config",
    "evolve",
    "run_swarm",
    "run_world",
    "speculating",
    "tiny_config",
]
