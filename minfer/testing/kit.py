"""The policy kit: tests any scheduling policy against all guarantees of the engine, with
hypothesis.

All sizes are small: preemption is common, stories are short. Half of the engines use
drafts, as many as possible or as are profitable; most drafts are right.
"""

from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any, Final

import hypothesis
import hypothesis.strategies as st
from attrs import evolve
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from minfer.journal.codec import CodecError
from minfer.journal.writing import encode_journal
from minfer.records.acceptance import Costs
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Cancel, Submit
from minfer.records.policy import FirstCome
from minfer.records.request import Request
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state import EngineState
from minfer.records.state_keeping import StateKeeping
from minfer.testing.trial import VOCAB, PolicyError, Trial

# seconds since the event before it, event
Trace = tuple[tuple[float, Submit | Cancel], ...]
_gaps = st.sampled_from((0.0, 0.0, 0.001, 0.03, 0.4, 3.0, 20.0))
_paces = st.sampled_from((1.0, 0.1, 10.0))
# A few, so that a story has few choices: as many drafts as possible, or as profitable.
_FIXED: Final = Speculation(drafter=DEVICE, drafts=2, adaptive=False)
_PAYING: Final = Speculation(drafter=HOST, drafts=4, costs=Costs(((5, 1.0), (80, 1.5))))
# One full one, windowed ones, both, and recurrent layers, in bundles of pages.
GROUPS: Final = (
    (CacheGroup(),),
    (CacheGroup(),),
    (CacheGroup(window=6),),
    (CacheGroup(), CacheGroup(window=6)),
    (CacheGroup(), CacheGroup(window=5, pages=2)),
    (CacheGroup(window=6, pages=3), CacheGroup()),
    (CacheGroup(window=3), CacheGroup(pages=2), CacheGroup(window=9)),
    (CacheGroup(window=6, sink_tokens=5),),
    (CacheGroup(), CacheGroup(window=5, pages=2, sink_tokens=1)),
    (CacheGroup(), CacheGroup(state=True, pages=2)),
    (CacheGroup(window=5), CacheGroup(), CacheGroup(state=True)),
)
_speculations = st.sampled_from(
    (
        *(None,) * 5,
        _FIXED,
        evolve(_FIXED, drafter=HOST),
        evolve(_FIXED, drafts=4, rows=2),
        _PAYING,
        evolve(_PAYING, drafter=DEVICE),
    )
)
# The pools are so small that less would be no state.
_KEEPING: Final = StateKeeping(stride_blocks=1, max_share=0.5)


def requests(name: str = "r0") -> st.SearchStrategy[Request]:
    """Requests with the id `name`, of all kinds that the interfaces allow.

    Their prompts share a prefix; some stop early, are resumed with output, or will be
    rejected.
    """
    return st.builds(
        Request,
        id=st.just(name),
        max_tokens=st.integers(1, 20),
        prompt=st.integers(1, 10).map(lambda length: tuple(range(length))),
        stop_ids=st.sampled_from((frozenset[int](), frozenset(range(4)))),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        output=st.sampled_from(((), (), (), (5,))),
        priority=st.integers(-3, 3) | st.sampled_from((1 - 2**53, 2**53 - 1)),
        client=st.sampled_from(("", "a", "b")),
        deadline=st.sampled_from((inf, 1.0, 0.05, 30.0, 1e-9)),
    )


def _events(number: int) -> st.SearchStrategy[Submit | Cancel]:
    """The arrival of request `number`, or the cancelling of one of the last before it."""
    cancel = st.integers(max(0, number - 4), number).map(
        lambda target: Cancel(f"r{target}")
    )
    return st.one_of(*[requests(f"r{number}").map(Submit)] * 3, cancel)


@st.composite
def traces(draw: st.DrawFn, most: int = 20) -> Trace:
    """Up to `most` arrivals and cancels, in bursts and after pauses: (seconds of pause,
    event).
    """
    return tuple(
        (draw(_gaps), draw(_events(i))) for i in range(draw(st.integers(0, most)))
    )


@st.composite
def configs(draw: st.DrawFn, policy: Any) -> EngineConfig:
    """Engines under `policy` with few rows, few blocks and a small budget; some of them
    speculate, and some have several groups of layers.
    """
    groups = draw(st.sampled_from(GROUPS))
    spec_config = draw(_speculations)
    several = sum(not group.state for group in groups) > 1
    if several and spec_config is not None:  # no draft model
        spec_config = evolve(spec_config, drafter=HOST)
    return EngineConfig(
        policy=policy,
        num_blocks=draw(st.integers(6, 14)) * sum(group.pages for group in groups),
        max_num_seqs=draw(st.integers(1, 4)),
        block_size=draw(st.sampled_from((4, 2, 3))),
        max_model_len=32,
        vocab_size=VOCAB,
        max_num_batched_tokens=draw(st.sampled_from((64, 4, 6, 16))),
        depth=draw(st.integers(1, 3)),
        watermark=draw(st.sampled_from((0, 1))),
        groups=groups,
        states=_KEEPING,
        speculation=spec_config,
    )


@st.composite
def states(draw: st.DrawFn, policy: Any) -> tuple[EngineConfig, EngineState]:
    """An engine under `policy`, and a state that it reached by running."""
    trial = Trial(draw(configs(policy)), draw(_paces))
    for gap, event in draw(traces()):
        trial.tell(event, gap)
    trial.tell(Cancel("unknown"), draw(st.floats(0.1, 9)))
    return trial.config, trial.state


def check_policy(
    policy: Any,
    *,
    max_examples: int = 100,
    seed: int | None = None,
    save: str | None = None,
    overtakes: int = 8,
    patience: float = 10.0,
    hold: float = 1.0,
) -> None:
    """Raise PolicyError unless `policy`, any object with the methods of Policy, keeps
    every law.

    It runs as many stories as Hypothesis tries by default, random or from `seed`; a
    failing story is shrunk, is in the message and, if `save` is a path, is written there
    as a journal. The laws:

    - Promises: each answer is as `minfer.records.policy.Policy` requires and the same for
      equal arguments, and changes none of them; nothing raises. The engine decides each
      turn the same way a second time.
    - Invariants: those of `minfer.testing.invariants`, after every turn.
    - No deadlock: all requests end and are freed, within 50 turns and 4 for each token;
      and while nothing runs, no request waits for more than `hold` seconds (a window
      needs its own length).
    - Bounded starvation: while a request waits and its equals (all but the id) keep
      coming, at most `overtakes` of them are admitted, see `Trial.compete`; and of the
      shortest that keep coming, at most as many that came `patience` seconds later
      (shortest first needs what 21 tokens weigh).
    """

    if isinstance(policy, type) or not hasattr(policy, "rank"):
        raise TypeError(
            f"check_policy takes a policy, such as FirstCome(), not {policy!r}"
        )
    tried = _stories(policy, max_examples, overtakes, patience, hold)
    try:
        (tried if seed is None else hypothesis.seed(seed)(tried))()
    except (PolicyError, FlakyFailure) as caught:
        # "Flaky" means that a policy's answers depend on more than its arguments.
        error: Any = caught if isinstance(caught, PolicyError) else caught.exceptions[0]
        if save is not None:
            _save(error, save)
        raise error from error.__cause__


def _stories(
    policy: Any, max_examples: int, overtakes: int, patience: float, hold: float
) -> Callable[[], None]:
    """The function that tests a policy with stories drawn by hypothesis."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(configs(policy), _paces, traces(), requests("mine"), st.integers(-2, 2))
    def tried(
        config: EngineConfig, pace: float, trace: Trace, request: Request, interval: int
    ) -> None:
        trial = Trial(config, pace, overtakes, patience, hold)
        for gap, event in trace:
            trial.tell(event, gap)
        if interval:
            request = evolve(request, stop_ids=frozenset(), output=())
            trial.compete(request, abs(interval), short=interval < 0)
        trial.finish()

    return tried


def _save(error: PolicyError, path: str) -> None:
    """Write the story of a failure as a journal; if that fails, the error says why."""
    try:
        journal = encode_journal(error.config, error.turns)
    except CodecError as codec_error:
        error.add_note(f"no journal was saved: {codec_error}")
        return
    with open(path, "wb") as file:
        file.write(journal)


class PolicyMachine(RuleBasedStateMachine):
    """The laws under rules: set `policy` in a subclass, add rules on `trial`, run its
    TestCase.
    """

    policy: Any = FirstCome()

    @initialize(config=configs(FirstCome()), pace=_paces)
    def begin(self, config: EngineConfig, pace: float) -> None:
        """Start an engine."""
        self.trial = Trial(evolve(config, policy=self.policy), pace)
        self.numbers = count()

    @rule(gap=_gaps, data=st.data())
    def tell(self, gap: float, data: st.DataObject) -> None:
        """Send an event, after a while."""
        self.trial.tell(data.draw(_events(next(self.numbers))), gap)

    def teardown(self) -> None:
        """Check that everything ends."""
        if hasattr(self, "trial") and not self.trial._flaws:
            self.trial.finish()
