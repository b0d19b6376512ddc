"""The accounts of load: requests that were dispatched to replicas, have started, ended.

dispatch --> waiting for prefill --> start --> running --> end
                    |                                       ^
                    +---------------------------------------+
"""

from minfer.routing.messages import LoadReport, RoutingRequest
from minfer.routing.state import Dispatch, Replica, RouterState
from minfer.values.pmap import Map
from minfer.values.record import evolve


def prefill_tokens(tokens: int, hit: int, block_size: int) -> int:
    """How many tokens of a prompt are to be computed if `hit` blocks are cached: one at
    least.
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
    one = state.replicas[name]
    made = Dispatch(request.tenant, prefill, one.reports)
    one = evolve(
        one,
        requests=one.requests + 1,
        backlog=one.backlog + prefill,
        live=one.live.set(request.id, made),
        waiting=_added(one.waiting, request.tenant, prefill),
        waiting_tokens=one.waiting_tokens + prefill,
    )
    state = evolve(state, requests=state.requests.set(request.id, name))
    return with_replica(state, one)


def start(state: RouterState, request: str) -> RouterState:
    """Note that the prefill of a request, which is on a replica, is done."""
    one = state.replicas[state.requests[request]]
    made = one.live[request]
    if made.started:
        return state
    one = _computed(one, made)
    live = one.live.set(request, evolve(made, started=True))
    return with_replica(state, evolve(one, live=live))


def end(state: RouterState, request: str) -> RouterState:
    """Remove a request from its replica, if it is on one."""
    name = state.requests.get(request)
    if name is None:
        return state
    one = state.replicas[name]
    made = one.live[request]
    one = one if made.started else _computed(one, made)
    one = evolve(
        one,
        requests=one.requests - (made.report == one.reports),
        live=one.live.delete(request),
    )
    state = evolve(state, requests=state.requests.delete(request))
    return with_replica(state, one)


def report(state: RouterState, load: LoadReport) -> RouterState:
    """Take a replica's word for its load, which includes all requests until now."""
    one = evolve(
        state.replicas[load.replica],
        requests=load.waiting + load.running,
        backlog=load.prefill,
        pages=load.pages,
        reports=state.replicas[load.replica].reports + 1,
    )
    return with_replica(state, one)


def lose(state: RouterState, replica: Replica) -> RouterState:
    """Remove all requests of a replica, which has left."""
    requests = state.requests.mutate()
    for request in replica.live:
        del requests[request]
    return evolve(state, requests=requests.finish())


def _computed(one: Replica, made: Dispatch) -> Replica:
    """A replica after the prefill of one of its requests."""
    prefill = made.prefill
    return evolve(
        one,
        backlog=one.backlog - prefill * (made.report == one.reports),
        waiting=_added(one.waiting, made.tenant, -prefill),
        waiting_tokens=one.waiting_tokens - prefill,
    )


def _added(counts: Map[str, int], tenant: str, tokens: int) -> Map[str, int]:
    now = counts.get(tenant, 0) + tokens
    return counts.set(tenant, now) if now else counts.delete(tenant)
