"""The router's interface: requests to be routed, events, decisions and their reasons.

All are made at the edge, and checked when they are made: a wrong value raises
ParameterError there.
"""

from typing import Final, get_args

from attrs import frozen

from minfer.blocks.keys import Keys
from minfer.values.checks import (
    LARGEST_TOKEN,
    MAX_INT64,
    ParameterError,
    check_number,
    check_text,
)


def _check_keys(keys: Keys) -> None:
    if type(keys) is not tuple or not set(map(type, keys)) <= {bytes}:
        raise ParameterError("keys", "must be a tuple of bytes")


@frozen
class RoutingRequest:
    """What the router must know of a request.

    `keys` are the content keys of the prompt's full blocks, in order
    (`minfer.blocks.keys`); requests of a session continue each other.
    """

    id: str
    keys: Keys
    tokens: int  # of the prompt
    tenant: str = ""
    session: str = ""  # none, if empty
    output: int | None = None  # expected output tokens
    # The replicas that can serve it, by name; None: all.
    allowed: tuple[str, ...] | None = None
    adapter: str = ""  # that it needs, by a digest or another name; none, if empty

    def __attrs_post_init__(self) -> None:
        if self.allowed is not None and (
            type(self.allowed) is not tuple or not set(map(type, self.allowed)) <= {str}
        ):
            raise ParameterError("allowed", "must be a tuple of names")
        for param in ("id", "tenant", "session", "adapter"):
            check_text(getattr(self, param), param)
        _check_keys(self.keys)
        check_number(self.tokens, "tokens", 0, LARGEST_TOKEN, whole=True)
        if self.output is not None:
            check_number(self.output, "output", 0, LARGEST_TOKEN, whole=True)


# --- events -----------------------------------------------------------------------------


@frozen
class _ReplicaEvent:
    """Base of events about one replica."""

    replica: str

    def __attrs_post_init__(self) -> None:
        check_text(self.replica, "replica")


@frozen
class ReplicaJoined(_ReplicaEvent):
    """A replica takes requests: a new one, or one that was draining. Its cache is empty,
    but for blocks that are published after this.
    """


@frozen
class ReplicaDraining(_ReplicaEvent):
    """A replica gets no more requests; those that it has go on."""


@frozen
class ReplicaLeft(_ReplicaEvent):
    """A replica has ended or died, and its requests with it."""


@frozen
class CacheCleared(_ReplicaEvent):
    """A replica has lost all cached blocks; or its events were missed, and it is about to
    publish all that it has.
    """


@frozen
class BlocksPublished(_ReplicaEvent):
    """Blocks that a replica has in its prefix cache from now on."""

    keys: Keys

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_keys(self.keys)


@frozen
class BlocksEvicted(_ReplicaEvent):
    """Blocks that a replica no longer has."""

    keys: Keys

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_keys(self.keys)


@frozen
class LoadReport(_ReplicaEvent):
    """The load of a replica, which includes all requests that were routed to it before.

    A replica that never reports is judged by what was routed to it.
    """

    waiting: int  # sequences
    running: int  # sequences
    prefill: int  # tokens of both whose prefill is still to come
    pages: int | None = None  # that can be allocated, if known
    # The adapters on its device, as requests name them; None: not known.
    adapters: tuple[str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        adapters = self.adapters
        if adapters is not None and (
            type(adapters) is not tuple or not set(map(type, adapters)) <= {str}
        ):
            raise ParameterError("adapters", "must be a tuple of names")
        for param in ("waiting", "running", "prefill"):
            check_number(getattr(self, param), param, 0, MAX_INT64, whole=True)
        if self.pages is not None:
            check_number(self.pages, "pages", 0, MAX_INT64, whole=True)


@frozen
class Dispatched(_ReplicaEvent):
    """A request was sent to a replica without `route`, or to another one than that."""

    request: RoutingRequest

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if type(self.request) is not RoutingRequest:
            raise ParameterError("request", "must be a RoutingRequest")


@frozen
class _RequestEvent:
    """Base of events about one request."""

    id: str

    def __attrs_post_init__(self) -> None:
        check_text(self.id, "id")


@frozen
class RequestStarted(_RequestEvent):
    """The first token of a request has come: its prefill is done."""


@frozen
class RequestEnded(_RequestEvent):
    """A request has ended, for whatever reason, or never reached its replica."""


RouterEvent = (
    ReplicaJoined
    | ReplicaDraining
    | ReplicaLeft
    | CacheCleared
    | BlocksPublished
    | BlocksEvicted
    | LoadReport
    | Dispatched
    | RequestStarted
    | RequestEnded
)
ROUTER_EVENTS: Final = frozenset(get_args(RouterEvent))


# --- decisions --------------------------------------------------------------------------


@frozen
class Estimate:
    """What a policy expects of a replica."""

    replica: str
    hit: int  # leading blocks of the prompt in its cache
    seconds: float  # the cost


@frozen
class ReplicaChoice:
    """A policy's answer: the replica, and why."""

    replica: str
    why: str  # a word or two, for people and metrics
    seconds: float | None = None  # the cost, if the policy estimates costs
    alternatives: tuple[Estimate, ...] = ()  # the best of the other replicas


@frozen
class Placed:
    """A request goes to a replica: why."""

    id: str
    replica: str
    why: str
    hit: int  # leading blocks of the prompt in its cache
    blocks: int  # full blocks of the prompt
    prefill: int  # tokens to be computed
    seconds: float | None = None  # as in `ReplicaChoice`
    alternatives: tuple[Estimate, ...] = ()
    # Why the policy's answer could not be used: then a replica with the fewest requests
    # was taken.
    override: str = ""


@frozen
class NoReplica:
    """No replica takes requests."""

    id: str
    draining: int  # replicas that are there and take none


@frozen
class Deferred:
    """Requests of the same tenant wait on replicas, and it has its share of what waits.

    Route the request again when one of them has started or ended: at the latest when none
    of the tenant waits, it is placed.
    """

    id: str
    tenant: str
    waiting: int  # tokens of the tenant whose prefill is still to come


@frozen
class Invalid:
    """What was to be routed is no RoutingRequest."""

    detail: str


Decision = Placed | NoReplica | Deferred | Invalid


@frozen
class RequestsLost:
    """A replica left, and these requests with it: route them again."""

    replica: str
    ids: tuple[str, ...]


@frozen
class EventIgnored:
    """An event had no meaning: an unknown replica, an unknown request."""

    event: str
    detail: str


RouterReason = RequestsLost | EventIgnored
