"""A routing policy on trial: a router under it, with all laws checked after each event.

- policy: answers are as `minfer.routing.policy.RoutingPolicy` requires, the same for
  equal arguments, and change none of them; nothing raises.
- eligible: a request goes to a replica that is there and not draining; if there is none,
  the decision is `NoReplica`.
- reason: hits and prefill tokens in reasons and candidates are true.
- determinism: the same decision in the same state.
- accounts: the load of a replica is what was dispatched and has not ended.
- index: a replica has what it published and has not evicted.
- deferred: a request is deferred only while others of its tenant wait, and placed when
  they have started.
- bounded load: of equal requests of which none ends, no replica gets many more than the
  average.
"""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from attrs import define, field

from minfer.routing.accounts import prefill_tokens
from minfer.routing.messages import (
    Deferred,
    NoReplica,
    Placed,
    ReplicaJoined,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.policy import Candidates
from minfer.routing.router import Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState
from minfer.testing.router_books import RouterBooks


class RouterError(AssertionError):
    """A routing policy broke a law: `law` is its name; `story` led to it."""

    def __init__(self, law: str, detail: str, policy: Any, story: list[str]) -> None:
        self.law, self.detail, self.story = law, detail, tuple(story)
        lines = [f"{law}: {detail}", f"under {policy!r:.200}, after", *story]
        super().__init__("\n  ".join(lines))


@define
class RouterTrial:
    """A router under `policy`. Raises RouterError when a law is broken."""

    policy: Any
    block_size: int = 4
    config: RouterConfig = field(init=False)
    state: RouterState = field(init=False)
    books: RouterBooks = field(init=False)
    story: list[str] = field(init=False, factory=list)
    _asked: Candidates = field(init=False, default=())  # candidates of the last question
    _flaws: list[tuple[str, str]] = field(init=False, factory=list)
    _raised: Exception | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        watch: Any = SimpleNamespace(start=self.policy.start, choose=self._ask)
        self.config = RouterConfig(watch, self.block_size)
        self.state = initial_router(self.config)
        self.books = RouterBooks(self.block_size)

    def _ask(self, *args: Any) -> Any:
        """Ask the policy twice, the second time with a deep copy of the arguments."""
        self._asked = args[2]
        try:
            twin = deepcopy(args)
            answer = self.policy.choose(*args)
            kept, same, again = deepcopy(answer), args == twin, self.policy.choose(*twin)
        except Exception as error:
            self._flaws.append(("never raises", f"choose raised {error!r}"))
            self._raised = self._raised or error
            raise  # the router goes on without an answer: `_must` raises later
        if not (same and answer == kept == again):
            report = f"choose is {kept!r}, then {again!r}; or its arguments changed"
            self._flaws.append(("purity", report))
        return answer

    def _must(self, holds: bool, law: str, detail: str) -> None:
        self._flaws += [] if holds else [(law, detail)]
        for flaw in self._flaws:
            raise RouterError(*flaw, self.policy, self.story) from self._raised

    def tell(self, event: RouterEvent) -> None:
        """Apply an event."""
        self.story.append(str(event))
        before = self.state
        self.state = apply(self.config, before, (event,)).state
        self.books.take(event)
        self._flaws += self.books.differences(self.state)
        again = apply(self.config, before, (event,)).state
        self._must(again == self.state, "determinism", "an event leads to two states")

    def route(self, request: RoutingRequest) -> Routed:
        """Route a request."""
        self.story.append(str(request))
        before = self.state
        found = route(self.config, before, request)
        self.story.append(f"  {found.reason}")
        self.state = found.state
        self.books.take(RequestEnded(request.id))
        self._check(request, found)
        if found.replica is not None:
            self.books.dispatch(found.replica, request)
        self._flaws += self.books.differences(self.state)
        again = route(self.config, before, request) == found
        self._must(again, "determinism", "a request is routed otherwise again")
        return found

    def _check(self, request: RoutingRequest, found: Routed) -> None:
        """Check a decision; the books do not have it yet."""
        names = self.books.open
        if names:
            self._check_candidates(request, names)
        match found.reason:
            case Placed() as placed:
                self._must(found.replica == placed.replica, "reason", "names differ")
                self._must(found.replica in names, "eligible", f"of {names}")
                self._must(not placed.override, "policy", f"it {placed.override}")
                self._check_placed(request, placed)
            case Deferred() as deferred:
                waits = [
                    self.books.replicas[name].waiting().get(request.tenant, 0)
                    for name in names
                ]
                self._must(sum(waits) > 0, "deferred", "none of its tenant waits")
                right = Deferred(request.id, request.tenant, sum(waits))
                self._must(deferred == right, "reason", f"not {right}")
            case NoReplica() as none:
                right_none = NoReplica(request.id, len(self.books.replicas))
                self._must(not names, "eligible", f"there are {names}")
                self._must(none == right_none, "reason", f"not {right_none}")
            case other:
                self._must(False, "reason", f"{other}")
        self._must(names != [] or found.replica is None, "eligible", "there is none")

    def _check_candidates(self, request: RoutingRequest, names: list[str]) -> None:
        """Check what the policy was asked about."""
        asked = [one.replica.name for one in self._asked]
        self._must(asked == names, "eligible", f"candidates {asked}, not {names}")
        for one in self._asked:
            hit = self.books.replicas[one.replica.name].hit(request)
            prefill = prefill_tokens(request.tokens, hit, self.block_size)
            right = (one.hit, one.prefill) == (hit, prefill)
            self._must(right, "reason", f"{one} hits {hit} blocks")

    def _check_placed(self, request: RoutingRequest, placed: Placed) -> None:
        hit = self.books.replicas[placed.replica].hit(request)
        prefill = prefill_tokens(request.tokens, hit, self.block_size)
        wants = (request.id, hit, len(request.keys), prefill)
        has = (placed.id, placed.hit, placed.blocks, placed.prefill)
        self._must(has == wants, "reason", f"{has}, not {wants}")

    def finish(self, request: RoutingRequest) -> None:
        """Check that a request is placed once all others have started."""
        self.tell(ReplicaJoined("last"))
        for name in self.books.live:
            self.tell(RequestStarted(name))
        found = self.route(request)
        self._must(found.replica is not None, "deferred", "though none waits")

    def flood(self, requests: list[RoutingRequest], spread: float) -> None:
        """Check that of these requests, of which none ends, no replica gets more than
        `spread` times the average, and one.
        """
        config = RouterConfig(self.policy, self.block_size)
        counts, state = dict.fromkeys(self.books.open, 0), self.state
        for request in requests:
            found = route(config, state, request)
            state = found.state
            if found.replica is not None:
                counts[found.replica] += 1
        most = spread * len(requests) / len(counts) + 1
        report = f"{counts} of {len(requests)} requests; at most {most:g}"
        self._must(max(counts.values()) <= most, "bounded load", report)
