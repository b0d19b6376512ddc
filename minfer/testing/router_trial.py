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

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Final

from attrs import define, field

from minfer.policies.mistakes import raising_line
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
from minfer.testing.call_limits import CallTooLongError, limits
from minfer.testing.hidden_state import HiddenState
from minfer.testing.policy_error import Flaw, record_line, shortened
from minfer.testing.router_books import RouterBooks

# Laws that a policy breaks with its answers; the others are the router's.
_OF_POLICY: Final = {
    "policy", "never raises", "purity", "hidden state", "never ends", "bounded load",
    "deferred", "determinism",
}  # fmt: skip
_SHOWN: Final = range(2)  # of the requests of a flood, and the last
# Laws that break if a policy keeps state of its own.
_OF_HIDDEN_STATE: Final = {"policy", "never raises", "purity", "determinism"}


@define
class _Watched:
    """A routing policy whose calls go through a trial."""

    trial: "RouterTrial"

    def start(self) -> Any:
        """The policy's first state."""
        return self.trial.policy.start()

    def choose(self, *args: Any) -> Any:
        """The policy's choice, checked."""
        return self.trial.call_policy(*args)


class RouterError(AssertionError):
    """A routing policy broke a law: `law` is its name; `story` led to it. `method` is the
    policy's method at fault; empty if it is the router.
    """

    def __init__(
        self, law: str, detail: str, policy: Any, story: Iterable[str], method: str = ""
    ) -> None:
        self.law, self.detail, self.policy = law, detail, policy
        self.story, self.method = tuple(story), method
        lines = [f"{law}: {detail}", *([f"method at fault: {method}"] if method else [])]
        lines += [f"under {policy!r:.200}, after", *shortened([*self.story])]
        super().__init__("\n  ".join(lines))

    def __reduce__(self) -> Any:
        return type(self), (self.law, self.detail, self.policy, self.story, self.method)


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
    _hidden: HiddenState = field(init=False)
    _raised: Exception | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        watched: Any = _Watched(self)
        self._hidden = HiddenState(self.policy)
        self.config = RouterConfig(watched, self.block_size)
        self.state = initial_router(self.config)
        self.books = RouterBooks(self.block_size)

    def call_policy(self, *args: Any) -> Any:
        """Ask the policy twice, the second time with a deep copy of the arguments."""
        self._asked = args[2]
        try:
            twin = deepcopy(args)
            with limits.call("choose"):
                answer = self.policy.choose(*args)
                copy, unchanged = deepcopy(answer), args == twin
                repeated = self.policy.choose(*twin)
        except CallTooLongError as error:
            self._flaws.append(("never ends", f"choose {error}"))
            raise RuntimeError(f"choose {error}") from None
        except Exception as error:
            line = raising_line(error, getattr(self.policy, "choose", None))
            self._flaws.append(("never raises", f"choose raised {error!r} ({line})"))
            self._raised = self._raised or error
            raise  # the router goes on without an answer: `_require` raises later
        if not (unchanged and answer == copy == repeated):
            report = f"choose is {copy!r}, then {repeated!r}; or its arguments changed"
            self._flaws.append(("purity", report))
        return answer

    def _require(self, holds: bool, law: str, detail: str) -> None:
        self._flaws += [] if holds else [(law, detail)]
        for law, text in self._flaws:
            flaw = self._explained(law, text)
            raise RouterError(
                flaw.law, flaw.detail, self.policy, self.story, flaw.method
            ) from self._raised

    def _explained(self, law: str, detail: str) -> Flaw:
        """The flaw; if it is one of state that the policy keeps for itself, as that."""
        changed = self._hidden.changed() if law in _OF_HIDDEN_STATE else ""
        if changed:
            detail = (
                f"choose changes {changed}, which is no part of the policy's state: "
                f"start() returns the first, and choose the next. Found by {law}: "
                f"{detail}"
            )
            law = "hidden state"
        return Flaw(law, detail, "choose" if law in _OF_POLICY else "")

    def tell(self, event: RouterEvent) -> None:
        """Apply an event."""
        self.story.append(record_line(event))
        before = self.state
        self.state = apply(self.config, before, (event,)).state
        self.books.take(event)
        self._flaws += self.books.differences(self.state)
        repeated = apply(self.config, before, (event,)).state
        self._require(
            repeated == self.state, "determinism", "an event leads to two states"
        )

    def route(self, request: RoutingRequest) -> Routed:
        """Route a request."""
        self.story.append(record_line(request))
        before = self.state
        routed = route(self.config, before, request)
        self.story.append(f"  {record_line(routed.reason)}")
        self.state = routed.state
        self.books.take(RequestEnded(request.id))
        self._check(request, routed)
        if routed.replica is not None:
            self.books.dispatch(routed.replica, request)
        self._flaws += self.books.differences(self.state)
        is_same = route(self.config, before, request) == routed
        self._require(is_same, "determinism", "a request is routed otherwise again")
        return routed

    def _check(self, request: RoutingRequest, routed: Routed) -> None:
        """Check a decision; the books do not have it yet."""
        names = self.books.open
        if names:
            self._check_candidates(request, names)
        match routed.reason:
            case Placed() as placed:
                self._require(routed.replica == placed.replica, "reason", "names differ")
                self._require(routed.replica in names, "eligible", f"of {names}")
                self._require(not placed.override, "policy", f"it {placed.override}")
                self._check_placed(request, placed)
            case Deferred() as deferred:
                waits = [
                    self.books.replicas[name].waiting().get(request.tenant, 0)
                    for name in names
                ]
                self._require(sum(waits) > 0, "deferred", "none of its tenant waits")
                expected = Deferred(request.id, request.tenant, sum(waits))
                self._require(deferred == expected, "reason", f"not {expected}")
            case NoReplica() as none:
                expected_none = NoReplica(request.id, len(self.books.replicas))
                self._require(not names, "eligible", f"there are {names}")
                self._require(none == expected_none, "reason", f"not {expected_none}")
            case unknown:
                self._require(False, "reason", f"{unknown}")
        self._require(names != [] or routed.replica is None, "eligible", "there is none")

    def _check_candidates(self, request: RoutingRequest, names: list[str]) -> None:
        """Check what the policy was asked about."""
        asked = [candidate.replica.name for candidate in self._asked]
        self._require(asked == names, "eligible", f"candidates {asked}, not {names}")
        for candidate in self._asked:
            hit = self.books.replicas[candidate.replica.name].hit(request)
            prefill = prefill_tokens(request.tokens, hit, self.block_size)
            is_true = (candidate.hit, candidate.prefill) == (hit, prefill)
            self._require(is_true, "reason", f"{candidate} hits {hit} blocks")

    def _check_placed(self, request: RoutingRequest, placed: Placed) -> None:
        hit = self.books.replicas[placed.replica].hit(request)
        prefill = prefill_tokens(request.tokens, hit, self.block_size)
        expected = (request.id, hit, len(request.keys), prefill)
        actual = (placed.id, placed.hit, placed.blocks, placed.prefill)
        self._require(actual == expected, "reason", f"{actual}, not {expected}")

    def finish(self, request: RoutingRequest) -> None:
        """Check that a request is placed once all others have started."""
        self.tell(ReplicaJoined("last"))
        for name in self.books.live:
            self.tell(RequestStarted(name))
        routed = self.route(request)
        self._require(routed.replica is not None, "deferred", "though none waits")

    def flood(self, requests: list[RoutingRequest], spread: float) -> None:
        """Check that of these requests, of which none ends, no replica gets more than
        `spread` times the average, and one.
        """
        config = RouterConfig(self.policy, self.block_size)
        counts, state = dict.fromkeys(self.books.open, 0), self.state
        self.story.append(f"{len(requests)} requests, of which none ends:")
        for number, request in enumerate(requests):
            routed = route(config, state, request)
            if number in _SHOWN or request is requests[-1]:
                self.story.append(f"  {record_line(request)}")
                self.story.append(f"    {record_line(routed.reason)}")
            state = routed.state
            if routed.replica is not None:
                counts[routed.replica] += 1
        limit = spread * len(requests) / len(counts) + 1
        report = f"{counts} of {len(requests)} requests; at most {limit:g}"
        self._require(max(counts.values()) <= limit, "bounded load", report)
