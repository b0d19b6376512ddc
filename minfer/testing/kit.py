"""The policy kit: tests any scheduling policy against all guarantees of the engine, with
hypothesis.

All sizes are small: preemption is common, stories are short. Half of the engines use
drafts, as many as possible or as are profitable; most drafts are right.
"""

from collections.abc import Iterable
from contextlib import closing
from itertools import count
from math import inf
from typing import Any, Final

import hypothesis.strategies as st
from attrs import evolve
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from minfer.blocks.keys import root_key
from minfer.journal.codec import CodecError
from minfer.journal.writing import encode_journal
from minfer.policies.mistakes import misnamed_methods
from minfer.records.acceptance import Costs
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Cancel, Submit
from minfer.records.policy import FirstCome
from minfer.records.request import Request
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state import EngineState
from minfer.records.state_keeping import StateKeeping
from minfer.testing.bounded import run_bounded
from minfer.testing.fault_method import with_hidden_state, with_method
from minfer.testing.heavy_draws import heavy_stories
from minfer.testing.hidden_state import HiddenState
from minfer.testing.policy_error import PolicyError
from minfer.testing.second_process import SecondProcess, is_second_process
from minfer.testing.stories import (
    AnyStory,
    Bounds,
    SteadyLoad,
    Story,
    Trace,
    growing_story,
)
from minfer.testing.story_search import FailedStory, Search
from minfer.testing.trial import VOCAB, Law, Trial

HEAVY_SHARE: Final = 60  # stories with heavy tails for each hundred other stories
SEARCH_SIZE: Final = 10  # ordinary stories that are drawn by one search
_gaps = st.sampled_from((0.0, 0.0, 0.001, 0.03, 0.4, 3.0, 20.0))
_paces = st.sampled_from((1.0, 0.1, 10.0))
# Most are equal or adjacent, as policies compare them; a few are extreme.
_priorities = st.sampled_from((0, 1, -1, 0, 1, 2, -3, 1 - 2**53, 2**53 - 1))
# Two kinds, so that a story has few choices: as many drafts as possible, or as many as
# are profitable.
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
_ADAPTERS: Final = ("", "a1", "", "b2", "")  # of which one has a slot
# The pools are so small that a smaller share would not have room for a state.
_KEEPING: Final = StateKeeping(stride_blocks=1, max_share=0.5, inside_from=4)


def requests(name: str = "r0") -> st.SearchStrategy[Request]:
    """Requests with the id `name`, of all kinds that the interfaces allow.

    Their prompts share a prefix; some stop early, are resumed with output, have one of
    two adapters, or will be rejected.
    """
    drawn = st.builds(
        Request,
        id=st.just(name),
        max_tokens=st.integers(1, 20),
        prompt=st.integers(1, 10).map(lambda length: tuple(range(length))),
        stop_ids=st.sampled_from((frozenset[int](), frozenset(range(4)))),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        output=st.sampled_from(((), (), (), (5,))),
        priority=_priorities,
        client=st.sampled_from(("", "a", "b")),
        deadline=st.sampled_from((inf, 1.0, 0.05, 30.0, 1e-9)),
    )
    return drawn.map(_with_adapter)


def _with_adapter(request: Request) -> Request:
    """The request with an adapter, or none: that is not drawn, so that stories have as
    few choices as without.
    """
    adapter = _ADAPTERS[request.max_tokens % len(_ADAPTERS)]
    root = root_key(b"", b"", adapter) if adapter else b""
    return evolve(request, adapter=adapter, root=root)


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
        adapter_slots=len(set(_ADAPTERS)) - 2,
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
    laws: Iterable[Law] = (),
    seconds: float = 300.0,
    own_process: bool = True,
) -> None:
    """Raise PolicyError unless `policy`, any object with the methods of Policy, keeps
    every law.

    It runs as many stories as Hypothesis tries by default, random or from `seed`; a
    failing story is shrunk, is in the message and, if `save` is a path, is written there
    as a journal. The laws:

    - Misnamed method: no method has nearly a name of the protocol, so that nobody calls
      it.
    - Promises: each answer is as `minfer.records.policy.Policy` requires and the same for
      equal arguments, and changes none of them; nothing raises, on rare arguments and
      loads either. The engine decides each turn the same way a second time.
    - Hidden state, clock, randomness, prints: nothing is kept outside of the policy's
      state, and no method calls a clock or random numbers, or prints.
    - Set order: a second process, with other hashes of strings, gives the same answers.
    - State size: the policy's state does not grow for ever under a steady load.
    - Never ends, memory: each method returns, within a bound of memory.
    - Invariants: those of `minfer.testing.invariants`, after every turn.
    - No deadlock: all requests end and are freed, within 50 turns and 4 for each token;
      and while nothing runs, no request waits for more than `hold` seconds (a window
      needs its own length).
    - Bounded starvation: while a request waits, and requests that are equal but for the
      id keep coming, at most `overtakes` of these are admitted, see `Trial.compete`. If
      the shortest possible requests keep coming, the same holds for those that come at
      least `patience` seconds later (a policy that prefers short requests needs as many
      seconds as 21 tokens are worth to it).
    - `laws`: promises of your own. Each is called with the trial after every turn, and
      raises AssertionError if it is broken; README.md has an example.

    It runs in a process of its own, for `seconds` of CPU time at most. With
    `own_process=False`, for a debugger, it runs in this one, and nothing ends a call that
    does not return.
    """
    if isinstance(policy, type) or not hasattr(policy, "rank"):
        raise TypeError(
            f"check_policy takes a policy, such as FirstCome(), not {policy!r}"
        )
    if is_second_process():  # it imports a program that tests a policy
        return
    for name, sentence in misnamed_methods(type(policy)).items():
        raise PolicyError("misnamed method", sentence, None, (), name)
    bounds = Bounds(overtakes, patience, hold, tuple(laws))

    def check() -> None:
        with closing(SecondProcess(policy)) as second:
            _check(policy, bounds, max_examples, seed, save, second)

    def make_error(law: str, detail: str, method: str) -> PolicyError:
        return PolicyError(law, f"{type(policy).__name__}: {detail}", None, (), method)

    if own_process:
        run_bounded(check, make_error, seconds)
    else:
        check()


def _check(
    policy: Any,
    bounds: Bounds,
    max_examples: int,
    seed: int | None,
    save: str | None,
    second: SecondProcess,
) -> None:
    """Run the stories of each kind. Raises PolicyError for the first that fails."""
    hidden = HiddenState(policy)
    second.start()
    ordinary = st.builds(
        Story, configs(policy), _paces, traces(), requests("mine"), st.integers(-2, 2)
    )
    kinds: list[tuple[st.SearchStrategy[AnyStory], int, int | None]] = [
        (heavy_stories(policy), 2, _search_seed(seed, index))
        for index in range(max(1, max_examples * HEAVY_SHARE // 100))
    ]
    kinds += [
        (st.just(SteadyLoad(fresh_clients=False)), 1, seed),
        (st.just(SteadyLoad(fresh_clients=True)), 1, seed),
    ]
    kinds += [
        (ordinary, min(SEARCH_SIZE, max_examples - begin), _search_seed(seed, begin))
        for begin in range(0, max_examples, SEARCH_SIZE)
    ]
    for stories, number, search_seed in kinds:
        search = Search(policy, bounds, second, hidden)
        search.run(stories, number, search_seed)
        if search.failed is not None:
            error = _explained(search.failed, hidden, bounds)
            if save is not None:
                _save(error, save)
            raise error from search.failed.error.__cause__


def _search_seed(seed: int | None, index: int) -> int | None:
    """The seed of one of several searches.

    In a long search, hypothesis varies a few stories, and rare values are often in none
    of them. So ordinary stories are divided among several searches, and each heavy story
    has a search of its own. A search begins with the simplest story, so that of a heavy
    story tries two.
    """
    return None if seed is None else 10_000 * seed + index


def _explained(failed: FailedStory, hidden: HiddenState, bounds: Bounds) -> PolicyError:
    """The error of a story, with the method at fault, and as what it is."""
    error, story = failed.error, failed.story
    if error.law not in ("clock", "randomness", "never ends", "memory", "hidden state"):
        error = with_hidden_state(error, story, hidden, bounds)
    hidden.restore()
    error = with_method(error, story, hidden.policy, bounds)
    if error.law == "state size":
        error = growing_story(error, hidden.policy, bounds)
    return error


def _save(error: PolicyError, path: str) -> None:
    """Write the story of a failure as a journal; if that fails, the error says why."""
    assert error.config is not None  # noqa: S101  # it has a story
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
