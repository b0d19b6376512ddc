"""The router's kit: tests any routing policy against all laws of the router, with
hypothesis.

Stories are short and small: few replicas that join, drain and die often, prompts of few
blocks that share prefixes, requests of few tenants.
"""

from collections.abc import Callable
from typing import Any, Final

import hypothesis
import hypothesis.strategies as st
from attrs import evolve
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FlakyFailure

from minfer.blocks.keys import Key, Keys, block_key, block_keys
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Dispatched,
    LoadReport,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.testing.bounded import run_bounded
from minfer.testing.hidden_state import HiddenState
from minfer.testing.router_trial import RouterError, RouterTrial

BLOCK_SIZE: Final = 4  # tokens
REQUESTS_PER_REPLICA: Final = 16  # equal requests for each replica
PHASES: Final = (Phase.generate, Phase.shrink)

Prompt = tuple[int, ...]  # one number for each block
_names = st.sampled_from("abcd")
_prompts = st.lists(st.integers(0, 1), max_size=6).map(tuple)
_numbers = st.integers(0, 40)


def keys_of(prompt: Prompt) -> Keys:
    """The keys of a prompt, of which each number stands for a block."""
    return block_keys(b"", prompt, 1)


def routing_requests(ids: st.SearchStrategy[str]) -> st.SearchStrategy[RoutingRequest]:
    """Requests of all kinds; their prompts share prefixes."""

    def build(name: str, prompt: Prompt, rest: int, fields: dict[str, Any]) -> Any:
        tokens = BLOCK_SIZE * len(prompt) + rest
        return RoutingRequest(name, keys_of(prompt), tokens, **fields)

    fields = st.fixed_dictionaries(
        {
            "tenant": st.sampled_from(("", "x", "y")),
            "session": st.sampled_from(("", "s", "t")),
            "output": st.sampled_from((None, 0, 9, 400)),
        }
    )
    return st.builds(build, ids, _prompts, st.integers(0, BLOCK_SIZE - 1), fields)


_ids = st.integers(0, 6).map(lambda number: f"r{number}")
_prefixes = _prompts.filter(bool)
_restarts = _names.map(lambda name: (ReplicaLeft(name), ReplicaJoined(name)))
_events: st.SearchStrategy[RouterEvent] = st.one_of(
    _names.map(ReplicaJoined),
    _names.map(ReplicaJoined),
    _names.map(ReplicaDraining),
    _names.map(ReplicaLeft),
    _names.map(CacheCleared),
    st.builds(
        lambda name, prefix: BlocksPublished(name, keys_of(prefix)), _names, _prefixes
    ),
    st.builds(
        lambda name, prefix: BlocksPublished(name, keys_of(prefix)), _names, _prefixes
    ),
    st.builds(LoadReport, _names, _numbers, _numbers, _numbers, st.none() | _numbers),
    st.builds(Dispatched, _names, routing_requests(_ids)),
    _ids.map(RequestStarted),
    _ids.map(RequestEnded),
)
# A number evicts a block; nothing is the simplest step, so that stories shrink to it.
_steps = st.one_of(
    st.none(),
    _events,
    _events,
    _restarts,
    st.integers(0, 60),
    *[routing_requests(_ids)] * 3,
)
_stories = st.lists(_steps, min_size=12, max_size=40)


def _evicted(trial: RouterTrial, number: int) -> BlocksEvicted | None:
    """The eviction of one of all cached blocks, and of those that follow it: an engine
    evicts no block before those.
    """
    replicas = trial.books.replicas
    cached = sorted(
        (name, key) for name, replica in replicas.items() for key in replica.keys
    )
    if not cached:
        return None
    name, key = cached[number % len(cached)]
    evicted, todo = list[Key](), [key]
    while todo:
        key = todo.pop()
        if key in replicas[name].keys:
            evicted.append(key)
            todo += [block_key(key, (follower,)) for follower in (0, 1)]
    return BlocksEvicted(name, tuple(reversed(evicted)))


def _take(trial: RouterTrial, step: Any) -> None:
    """Take a step of a story."""
    match step:
        case RoutingRequest():
            trial.route(step)
        case int():
            _take(trial, _evicted(trial, step))
        case tuple():
            for event in step:
                trial.tell(event)
        case None:
            pass
        case event:
            trial.tell(event)


def check_router(
    policy: Any,
    *,
    max_examples: int = 100,
    seed: int | None = None,
    spread: float = 2.0,
    seconds: float = 300.0,
    own_process: bool = True,
) -> None:
    """Raise RouterError unless `policy`, any object with the methods of RoutingPolicy,
    keeps every law (`minfer.testing.router_trial` lists them).

    It runs as many stories as Hypothesis tries by default, random or from `seed`; a
    failing story is shrunk, and is in the message. Of equal requests of which none ends,
    no replica may get more than `spread` times the average plus one.

    It runs in a process of its own, for `seconds` of CPU time at most; with
    `own_process=False`, for a debugger, in this one.
    """
    missing = [name for name in ("start", "choose") if not hasattr(policy, name)]
    if isinstance(policy, type) or "choose" in missing:
        raise TypeError(
            f"check_router takes a routing policy, such as Prefix(), not {policy!r}"
        )
    if missing:
        raise TypeError(
            f"routing policy {type(policy).__name__} has no method start: it returns the "
            "policy's first state, such as None"
        )

    def check() -> None:
        _check(policy, max_examples, seed, spread)

    def make_error(law: str, detail: str, method: str) -> RouterError:
        return RouterError(law, detail, policy, (), method)

    if own_process:
        run_bounded(check, make_error, seconds)
    else:
        check()


def _check(policy: Any, max_examples: int, seed: int | None, spread: float) -> None:
    """Run the stories. Raises RouterError."""
    hidden = HiddenState(policy)
    tried = _trials(policy, hidden, max_examples, spread)
    try:
        (tried if seed is None else hypothesis.seed(seed)(tried))()
    except (RouterError, FlakyFailure) as caught:
        # "Flaky" means that a policy's answers depend on more than its arguments.
        error: Any = caught if isinstance(caught, RouterError) else caught.exceptions[0]
        raise error from error.__cause__


def _trials(
    policy: Any, hidden: HiddenState, max_examples: int, spread: float
) -> Callable[[], None]:
    """The function that tests a policy with stories drawn by hypothesis."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        _stories,
        routing_requests(st.just("mine")),
        st.integers(1, 4),
        st.sampled_from((None, None, True, False)),
    )
    def tried(
        story: list[Any], request: RoutingRequest, replicas: int, alike: bool | None
    ) -> None:
        hidden.restore()  # so that a story does not depend on those before it
        trial = RouterTrial(policy, BLOCK_SIZE)
        for name in "abc":
            trial.tell(ReplicaJoined(name))
        for step in story:
            _take(trial, step)
        trial.finish(request)
        if alike is not None:
            _flood(policy, request, replicas, alike, spread)

    return tried


def _flood(
    policy: Any, request: RoutingRequest, replicas: int, alike: bool, spread: float
) -> None:
    """Send many requests that are equal, or differ in all but their length, to replicas
    of which one has the prompt.
    """
    if not request.keys:  # a hit needs a block
        tokens = request.tokens + BLOCK_SIZE
        request = evolve(request, keys=keys_of((0,)), tokens=tokens)
    trial = RouterTrial(policy, BLOCK_SIZE)
    for name in "abcd"[:replicas]:
        trial.tell(ReplicaJoined(name))
    trial.tell(BlocksPublished("a", request.keys))
    requests = []
    for number in range(REQUESTS_PER_REPLICA * replicas):
        keys, session = request.keys, request.session
        if not alike:
            keys = block_keys(b"%d" % number, (0,) * len(keys), 1)
            session = session and f"{session}{number}"
        requests.append(
            RoutingRequest(f"{number}", keys, request.tokens, request.tenant, session)
        )
    trial.flood(requests, spread)
