"""The accounts of load: requests that were dispatched to replicas, have started, ended.

dispatch --> waiting for prefill --> start --> running --> end
                    |                                       ^
                    +---------------------------------------+
"""

from typing import Final

from minfer.routing.messages import LoadReport, RoutingRequest
from minfer.routing.state import Dispatch, Replica, RouterState
from minfer.values.pmap import Map
from minfer.values.record import evolve

MAX_ADAPTERS: Final = 64  # of a replica, that are remembered between reports


def prefill_tokens(tokens: int, hit: int, block_size: int) -> int:
    """The tokens of a prompt that are to be computed if `hit` blocks are cached: at least
    one.
    """
    return max(tokens - hit * block_size, 1)


def with_replica(state: RouterState, replica: Replica) -> RouterState:
    """The state after a change of a replica."""
    return evolve(state, replicas=state.replicas.set(replica.name, replica))


def dispatch(
    state: RouterState, request: RoutingRequest, name: str, prefill: int
) -> RouterState:
    """Add a request, of which `prefill` tokens are to be computed, to a replica; if it is
    on one already, it leaves that.
    """
    state = end(state, request.id)
    replica = state.replicas[name]
    dispatched = Dispatch(request.tenant, prefill, replica.reports)
    replica = evolve(
        replica,
        requests=replica.requests + 1,
        backlog=replica.backlog + prefill,
        live=replica.live.set(request.id, dispatched),
        waiting=_add_tokens(replica.waiting, request.tenant, prefill),
        waiting_tokens=replica.waiting_tokens + prefill,
        adapters=_with_adapter(replica.adapters, request.adapter),
    )
    state = evolve(state, requests=state.requests.set(request.id, name))
    return with_replica(state, replica)


def _with_adapter(adapters: tuple[str, ...], adapter: str) -> tuple[str, ...]:
    """These adapters and another one, which is the latest; the oldest is forgotten."""
    if not adapter:
        return adapters
    others = [name for name in adapters if name != adapter]
    return (*others[-MAX_ADAPTERS + 1 :], adapter)


def start(state: RouterState, request_id: str) -> RouterState:
    """Note that the prefill of a request, which is on a replica, is done."""
    replica = state.replicas[state.requests[request_id]]
    dispatched = replica.live[request_id]
    if dispatched.started:
        return state
    replica = _finish_prefill(replica, dispatched)
    live = replica.live.set(request_id, evolve(dispatched, started=True))
    return with_replica(state, evolve(replica, live=live))


def end(state: RouterState, request_id: str) -> RouterState:
    """Remove a request from its replica, if it is on one."""
    name = state.requests.get(request_id)
    if name is None:
        return state
    replica = state.replicas[name]
    dispatched = replica.live[request_id]
    replica = replica if dispatched.started else _finish_prefill(replica, dispatched)
    replica = evolve(
        replica,
        requests=replica.requests - (dispatched.report == replica.reports),
        live=replica.live.delete(request_id),
    )
    state = evolve(state, requests=state.requests.delete(request_id))
    return with_replica(state, replica)


def report(state: RouterState, load: LoadReport) -> RouterState:
    """Set a replica's load to what it reported, which includes all requests until now."""
    before = state.replicas[load.replica]
    replica = evolve(
        before,
        requests=load.waiting + load.running,
        backlog=load.prefill,
        pages=load.pages,
        reports=before.reports + 1,
        adapters=before.adapters if load.adapters is None else load.adapters,
    )
    return with_replica(state, replica)


def drop_requests(state: RouterState, replica: Replica) -> RouterState:
    """Remove all requests of a replica, which has left."""
    requests = state.requests.mutate()
    for request_id in replica.live:
        del requests[request_id]
    return evolve(state, requests=requests.finish())


def _finish_prefill(replica: Replica, dispatched: Dispatch) -> Replica:
    """Remove the prefill of a request from the accounts of its replica."""
    prefill = dispatched.prefill
    return evolve(
        replica,
        backlog=replica.backlog - prefill * (dispatched.report == replica.reports),
        waiting=_add_tokens(replica.waiting, dispatched.tenant, -prefill),
        waiting_tokens=replica.waiting_tokens - prefill,
    )


def _add_tokens(counts: Map[str, int], tenant: str, tokens: int) -> Map[str, int]:
    total = counts.get(tenant, 0) + tokens
    return counts.set(tenant, total) if total else counts.delete(tenant)
