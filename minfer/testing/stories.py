"""Stories: what a trial of a policy consists of, as values that can be run again.

- `Story`: a small engine with all laws; arrivals, cancels, and a request that competes.
- `HeavyStory`: a large engine and loads with heavy tails, to find what a policy does on
  rare arguments; its answers are checked, and the engine's laws are not.
- `SteadyLoad`: the same load for long, to find states that grow.
"""

from itertools import pairwise
from typing import Any, Final, Protocol

from attrs import evolve, field, frozen

from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Submit
from minfer.records.request import Request
from minfer.testing.policy_error import PolicyError
from minfer.testing.second_process import SecondProcess
from minfer.testing.state_size import state_size
from minfer.testing.trial import VOCAB, Law, Trial

# seconds since the event before it, event
Trace = tuple[tuple[float, Submit | Cancel], ...]
HEAVY_TURNS: Final = 20  # of a heavy story, before all requests are cancelled
GAP_TURNS: Final = 6  # between groups of requests
_ROUNDS: Final = 12  # of a steady load, of which the last half counts
# With clients that never return: a state with a bound, such as the 1,024 accounts of fair
# shares, reaches it.
_FRESH_ROUNDS: Final = 26
_ROUND_REQUESTS: Final = 64
_FEW_REQUESTS: Final = 4  # in the short story of a state that grows


@frozen
class Bounds:
    """What a policy is allowed, and the laws of its user; as in `check_policy`."""

    overtakes: int = 8
    patience: float = 10.0
    hold: float = 1.0
    laws: tuple[Law, ...] = ()
    # Whether methods are called a second time, and turns decided again.
    repeats: bool = True


class AnyStory(Protocol):
    """A story that can be run under any policy."""

    def run(
        self, policy: Any, bounds: Bounds, second: SecondProcess | None = None
    ) -> Trial:
        """Run it. Raises PolicyError if a law breaks."""


def _trial(
    config: EngineConfig, policy: Any, bounds: Bounds, pace: float, *, thorough: bool
) -> Trial:
    config = evolve(config, policy=policy)
    limits = bounds.overtakes, bounds.patience, bounds.hold
    trial = Trial(config, pace, *limits, bounds.laws, thorough)
    trial.watched.twice = bounds.repeats
    return trial


@frozen
class Story:
    """Events on a small engine. Then `request` competes with equal requests, one every
    `interval` turns; with short ones if `interval` is negative; not at all if it is 0.
    """

    config: EngineConfig
    pace: float  # seconds that a step takes
    trace: Trace
    request: Request
    interval: int

    def run(
        self, policy: Any, bounds: Bounds, second: SecondProcess | None = None
    ) -> Trial:
        """Run it with all laws. Raises PolicyError."""
        trial = _trial(self.config, policy, bounds, self.pace, thorough=True)
        for gap, event in self.trace:
            trial.tell(event, gap)
        if self.interval:
            request = evolve(self.request, stop_ids=frozenset(), output=())
            trial.compete(request, abs(self.interval), short=self.interval < 0)
        trial.finish()
        if second is not None:
            trial.compare_with(second)
        return trial


@frozen
class Group:
    """Requests that arrive at once, alike but for their ids and clients."""

    count: int
    request: Request
    num_clients: int  # that they come from in turn; 1: all from the request's
    gap: float  # seconds since the group before


@frozen
class HeavyStory:
    """Groups of requests on a large engine; after some turns, all are cancelled."""

    config: EngineConfig
    groups: tuple[Group, ...]

    def run(
        self, policy: Any, bounds: Bounds, second: SecondProcess | None = None
    ) -> Trial:
        """Run it. Raises PolicyError if an answer breaks a promise."""
        trial = _trial(self.config, policy, bounds, 0.01, thorough=False)
        for number, group in enumerate(self.groups):
            trial.advance(group.gap, GAP_TURNS)
            for index in range(group.count):
                client = group.request.client
                if group.num_clients > 1:
                    client = f"{client}{index % group.num_clients}"
                name = f"g{number}.{index}"
                trial.tell(Submit(evolve(group.request, id=name, client=client)))
        for _ in range(HEAVY_TURNS):
            trial.turn(trial.now + trial.pace)
        trial.cancel_all()
        trial.finish()
        if second is not None:
            trial.compare_with(second)
        return trial


_STEADY: Final = EngineConfig(
    num_blocks=256,
    block_size=16,
    max_model_len=64,
    max_num_seqs=32,
    vocab_size=VOCAB,
    max_num_batched_tokens=512,
)


@frozen
class SteadyLoad:
    """Rounds of the same load; a round lasts until all its requests have ended. After
    some rounds, the size of the policy's state must not grow any more.
    """

    fresh_clients: bool  # each request has a client of its own; otherwise there are eight
    rounds: int = field()
    requests: int = _ROUND_REQUESTS  # a round
    _config: EngineConfig = field(default=_STEADY)

    @rounds.default
    def _default_rounds(self) -> int:
        return _FRESH_ROUNDS if self.fresh_clients else _ROUNDS

    def run(
        self, policy: Any, bounds: Bounds, second: SecondProcess | None = None
    ) -> Trial:
        """Run it. Raises PolicyError if the state grows."""
        del second
        trial, sizes = self.play(policy, bounds)
        self._check(trial, sizes)
        return trial

    def play(self, policy: Any, bounds: Bounds) -> tuple[Trial, list[int]]:
        """Run it; returns the sizes of the policy's state after each round, too."""
        trial = _trial(self._config, policy, bounds, 0.01, thorough=False)
        trial.watched.twice, sizes = False, list[int]()
        for number in range(self.rounds):
            for index in range(self.requests):
                trial.tell(Submit(self._request(number * self.requests + index)))
                if index % 9 == 8:
                    trial.tell(Cancel(f"r{number * self.requests + index - 4}"))
            while trial.state.requests or trial.has_work:
                trial.turn(trial.now + trial.pace)
            sizes.append(state_size(trial.state.policy))
            if self.requests > 1:
                del trial.turns[:-1]  # they hold all states
        return trial, sizes

    def _request(self, number: int) -> Request:
        client = f"c{number if self.fresh_clients else number % 8}"
        return Request(
            id=f"r{number}",
            prompt=(number % 7,) * (1 + number % 5),
            max_tokens=1 + number % 3,
            n=1 + (number % 11 == 10),
            priority=number % 3 - 1,
            client=client,
            deadline=(0.001, 1.0, 60.0)[number % 3],
        )

    def _check(self, trial: Trial, sizes: list[int]) -> None:
        late = sizes[len(sizes) // 2 :]
        grows = len(late) > 1 and all(a < b for a, b in pairwise(late))
        if grows:
            kind = "each of a client of its own" if self.fresh_clients else "of 8 clients"
            counts = ", ".join(f"{size:,}" for size in late[-6:])
            detail = (
                f"the policy's state grows for ever: after every {self.requests} more "
                f"requests, {kind}, all of which have ended, it has {counts} items"
            )
            raise PolicyError("state size", detail, trial.config, trial.turns)


def growing_story(error: PolicyError, policy: Any, bounds: Bounds) -> PolicyError:
    """The error with a shorter story, in which the state grows: a few requests, one after
    the other.
    """
    load = SteadyLoad(fresh_clients=True, rounds=_FEW_REQUESTS, requests=1)
    trial = load.play(policy, bounds)[0]
    size = state_size(policy.start()), state_size(trial.state.policy)
    detail = f"{error.detail}; in the story it grows from {size[0]} to {size[1]} items"
    return PolicyError(error.law, detail, trial.config, trial.turns, error.method)
