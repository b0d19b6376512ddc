"""The router: two pure functions, of which one decides and the other folds events.

Theory. N replicas of an engine, each with a prefix cache of its own. What they cache and
how much they have to do arrives as events; `route` picks the replica of a request, and
counts the request there at once, so that the next decision knows of it. It reads no
clock and draws no random number, and a decision costs a few look-ups in an index for
each, however many keys there are.

                        ReplicaJoined ----> live <---- ReplicaJoined
                                            |  ^            |
              CacheCleared, BlocksPublished,|  |            |
              BlocksEvicted, LoadReport     +--+        draining
                                            |               ^
                                            +-- ReplicaDraining
    ReplicaLeft: from both, out; its requests are lost, its keys leave the index

    route or Dispatched --> waiting on a replica -- RequestStarted --> running there
                                 |                                         |
                                 +-------------- RequestEnded -------------+--> out
"""

from collections.abc import Callable
from typing import Any, Final

from attrs import frozen

from minfer.routing.accounts import (
    dispatch,
    drop_requests,
    end,
    prefill_tokens,
    report,
    start,
    with_replica,
)
from minfer.routing.key_index import (
    add_slot,
    evict,
    prefix_hits,
    publish,
    remove_slot,
    sweep,
)
from minfer.routing.messages import (
    ROUTER_EVENTS,
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Decision,
    Deferred,
    Dispatched,
    Estimate,
    EventIgnored,
    Invalid,
    LoadReport,
    NoReplica,
    Placed,
    ReplicaChoice,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestsLost,
    RequestStarted,
    RouterEvent,
    RouterReason,
    RoutingRequest,
)
from minfer.routing.policy import Candidate, Candidates, fewest_requests
from minfer.routing.state import Replica, RouterConfig, RouterState
from minfer.values.checks import ConfigError
from minfer.values.record import evolve


@frozen
class Routed:
    """A decision: the replica, or None if there is none for now, and why."""

    state: RouterState
    replica: str | None
    reason: Decision


@frozen
class AppliedEvents:
    """The state after events, and what was out of the ordinary."""

    state: RouterState
    reasons: tuple[RouterReason, ...] = ()


def initial_router(config: RouterConfig) -> RouterState:
    """The state before the first event. Raises ConfigError for a policy that cannot
    start.
    """
    try:
        return RouterState(config.policy.start())
    except Exception as error:
        kind = type(config.policy).__name__
        raise ConfigError(f"routing policy {kind}: start() raised {error!r}") from error


# --- decisions --------------------------------------------------------------------------


def route(config: RouterConfig, state: RouterState, request: RoutingRequest) -> Routed:
    """Decide which replica gets a request, and count it there. Total: it never raises.

    A request that is on a replica already is routed anew, and leaves that.
    """
    if type(request) is not RoutingRequest:  # against the types
        return Routed(state, None, Invalid("it is no RoutingRequest"))
    state = end(state, request.id)
    candidates = _candidates(config, state, request)
    if not candidates:
        return Routed(state, None, NoReplica(request.id, len(state.names)))
    choice, policy, override = _ask_policy(config, state, request, candidates)
    if policy is not state.policy:
        state = evolve(state, policy=policy)
    if choice is None:
        waiting = _waiting_tokens(candidates, request.tenant)
        return Routed(state, None, Deferred(request.id, request.tenant, waiting))
    names = [candidate.replica.name for candidate in candidates]
    candidate = candidates[names.index(choice.replica)]
    state = dispatch(state, request, choice.replica, candidate.prefill)
    placed = Placed(
        id=request.id,
        replica=choice.replica,
        why=choice.why,
        hit=candidate.hit,
        blocks=len(request.keys),
        prefill=candidate.prefill,
        seconds=choice.seconds,
        alternatives=choice.alternatives,
        override=override,
    )
    return Routed(state, choice.replica, placed)


def _candidates(
    config: RouterConfig, state: RouterState, request: RoutingRequest
) -> Candidates:
    """The replicas that take requests and can serve this one, with what they have cached
    of it.
    """
    hits = prefix_hits(state.index, request.keys)
    candidates, replicas = [], state.replicas
    tokens, size = request.tokens, config.block_size
    for name in state.names:
        replica = replicas[name]
        if replica.draining or not _allows(request, name):
            continue
        blocks = hits.get(replica.slot, 0)
        candidates.append(Candidate(replica, blocks, max(tokens - blocks * size, 1)))
    return tuple(candidates)


def _allows(request: RoutingRequest, name: str) -> bool:
    return request.allowed is None or name in request.allowed


def _waiting_tokens(candidates: Candidates, tenant: str) -> int:
    """The prefill tokens of a tenant that wait on these replicas."""
    return sum(candidate.replica.waiting.get(tenant, 0) for candidate in candidates)


def _ask_policy(
    config: RouterConfig,
    state: RouterState,
    request: RoutingRequest,
    candidates: Candidates,
) -> tuple[ReplicaChoice | None, Any, str]:
    """The policy's answer and its new state; or a choice instead, and why the answer
    cannot be used. A policy is third-party code, and may do anything.
    """
    try:
        answer = config.policy.choose(state.policy, request, candidates)
        flaw = _flaw(answer, state, request, candidates)
    except Exception as error:  # any error is the policy's, and not the router's
        flaw = f"raised {type(error).__name__}"
    if flaw:
        fallback = fewest_requests(candidates).replica.name
        return ReplicaChoice(fallback, "load"), state.policy, flaw
    return *answer, ""


def _flaw(
    answer: Any, state: RouterState, request: RoutingRequest, candidates: Candidates
) -> str:
    """Why a policy's answer cannot be used; nothing if it can."""
    if type(answer) is not tuple or len(answer) != 2:
        return "returned no pair of choice and state"
    choice = answer[0]
    if choice is None:
        waiting = _waiting_tokens(candidates, request.tenant)
        return "" if waiting else "deferred a tenant of which nothing waits"
    if type(choice) is not ReplicaChoice or type(choice.why) is not str:
        return "returned no ReplicaChoice"
    chosen = state.replicas.get(choice.replica)
    if type(choice.replica) is not str or chosen is None or chosen.draining:
        return "chose a replica that takes no requests"
    if not _allows(request, choice.replica):
        return "chose a replica that cannot serve the request"
    seconds = choice.seconds
    if not (seconds is None or _is_time(seconds)):
        return "estimated a time that is no number"
    alternatives = choice.alternatives
    if type(alternatives) is not tuple or not all(map(_is_estimate, alternatives)):
        return "returned alternatives that are no estimates"
    return ""


def _is_time(value: Any) -> bool:
    return type(value) in (float, int) and value == value


def _is_estimate(value: Any) -> bool:
    return (
        type(value) is Estimate
        and type(value.replica) is str
        and type(value.hit) is int
        and _is_time(value.seconds)
    )


# --- events -----------------------------------------------------------------------------


def apply(
    config: RouterConfig, state: RouterState, events: tuple[RouterEvent, ...]
) -> AppliedEvents:
    """Fold events, in order. Total: no sequence of events raises."""
    reasons: list[RouterReason] = []
    for event in events:
        if type(event) not in ROUTER_EVENTS:  # against the types
            reasons.append(EventIgnored("event", "it is no event of a router"))
            continue
        folded = _fold(config, state, event)
        if isinstance(folded, AppliedEvents):
            state = folded.state
            reasons += folded.reasons
        else:
            state = folded
        if state.index.leaving:
            state = evolve(state, index=sweep(state.index))
    return AppliedEvents(state, tuple(reasons))


def _fold(
    config: RouterConfig, state: RouterState, event: RouterEvent
) -> RouterState | AppliedEvents:
    match event:
        case RequestStarted(id) | RequestEnded(id):
            if id not in state.requests:
                return _ignored(state, event, f"request {id!r} is on no replica")
            return start(state, id) if type(event) is RequestStarted else end(state, id)
        case ReplicaJoined(name):
            return _join(state, name)
    replica = state.replicas.get(event.replica)
    if replica is None:
        return _ignored(state, event, f"there is no replica {event.replica!r}")
    return _REPLICA_HANDLERS[type(event)](config, state, replica, event)


def _ignored(state: RouterState, event: RouterEvent, detail: str) -> AppliedEvents:
    return AppliedEvents(state, (EventIgnored(type(event).__name__, detail),))


def _join(state: RouterState, name: str) -> RouterState | AppliedEvents:
    """Add a replica, or have one that drains take requests again."""
    replica = state.replicas.get(name)
    if replica is not None:
        if replica.draining:
            return with_replica(state, evolve(replica, draining=False))
        detail = f"replica {name!r} is there; if it was restarted, it must leave first"
        return _ignored(state, ReplicaJoined(name), detail)
    slot, index = add_slot(state.index)
    names = tuple(sorted((*state.names, name)))
    return with_replica(evolve(state, index=index, names=names), Replica(name, slot))


def _drain(_: RouterConfig, state: RouterState, replica: Replica, __: Any) -> RouterState:
    return with_replica(state, evolve(replica, draining=True))


def _leave(
    _: RouterConfig, state: RouterState, replica: Replica, __: Any
) -> AppliedEvents:
    """Remove a replica, its requests and its keys."""
    state = evolve(
        drop_requests(state, replica),
        index=remove_slot(state.index, replica.slot),
        replicas=state.replicas.delete(replica.name),
        names=tuple([name for name in state.names if name != replica.name]),
    )
    return AppliedEvents(
        state, (RequestsLost(replica.name, tuple(sorted(replica.live))),)
    )


def _clear(_: RouterConfig, state: RouterState, replica: Replica, __: Any) -> RouterState:
    """Give a replica another slot, of which the index has no key."""
    slot, index = add_slot(remove_slot(state.index, replica.slot))
    return with_replica(evolve(state, index=index), evolve(replica, slot=slot))


def _publish(
    _: RouterConfig, state: RouterState, replica: Replica, event: BlocksPublished
) -> RouterState:
    return evolve(state, index=publish(state.index, replica.slot, event.keys))


def _evict(
    _: RouterConfig, state: RouterState, replica: Replica, event: BlocksEvicted
) -> RouterState:
    return evolve(state, index=evict(state.index, replica.slot, event.keys))


def _report(
    _: RouterConfig, state: RouterState, __: Replica, event: LoadReport
) -> RouterState:
    return report(state, event)


def _dispatch(
    config: RouterConfig, state: RouterState, replica: Replica, event: Dispatched
) -> RouterState:
    request = event.request
    blocks = prefix_hits(state.index, request.keys).get(replica.slot, 0)
    prefill = prefill_tokens(request.tokens, blocks, config.block_size)
    return dispatch(state, request, replica.name, prefill)


_REPLICA_HANDLERS: Final[dict[type, Callable[..., RouterState | AppliedEvents]]] = {
    ReplicaDraining: _drain,
    ReplicaLeft: _leave,
    CacheCleared: _clear,
    BlocksPublished: _publish,
    BlocksEvicted: _evict,
    LoadReport: _report,
    Dispatched: _dispatch,
}
