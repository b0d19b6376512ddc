"""An engine for tests of slow masks.

The clock stands still but where a matcher costs something, and threads do their jobs when
a test says so: nothing depends on how fast the machine is.
"""

from collections import defaultdict
from typing import Any

from attrs import define, field

from minfer.effects.live.constraints.grammar_masks import GrammarMasks
from minfer.effects.live.engine.driver import Driver
from minfer.effects.text.grammars.store import Grammars
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit, Event, Finished, Pause, Submit
from minfer.records.request import Request
from minfer.simulation.oracle import Oracle
from tests.effects.live.matchers import ByHand, Clock, Compiler, Counting

CONFIG = EngineConfig(
    num_blocks=90,
    block_size=4,
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    vocab_size=32,
    late_masks=True,
)
SLOW = 0.03  # seconds of a mask


@define
class Engine:
    """A driver whose masks are made by hand."""

    clock: Clock
    config: EngineConfig = CONFIG
    threads: ByHand = field(factory=ByHand)
    compiler: Compiler = field(init=False)
    masks: GrammarMasks = field(init=False)
    driver: Driver = field(init=False)
    tokens: dict[str, list[int]] = field(factory=lambda: defaultdict(list))
    ends: dict[str, Finished] = field(factory=dict)
    reasons: list[Any] = field(factory=list)
    held_up: float = 0.0  # seconds of masks that the driver made itself

    def __attrs_post_init__(self) -> None:
        self.compiler = Compiler(Counting, self.clock)
        self.masks = GrammarMasks(Grammars(lambda: self.compiler), 4)
        self.masks._threads = self.threads  # type: ignore[assignment]  # stands in
        oracle = Oracle(4, self.config.vocab_size)
        self.driver = Driver(self.config, oracle, clock=lambda: 0.0, masks=self.masks)

    def post(self, *events: Event | Request) -> None:
        for event in events:
            new_event = Submit(event) if isinstance(event, Request) else event
            self.driver.post(new_event)

    def turn(self, *events: Event | Request, times: int = 1) -> None:
        """Take some."""
        self.post(*events)
        for _ in range(times):
            started = self.clock.now
            turned = self.driver.turn()
            self.held_up += self.clock.now - started
            self.reasons += turned.reasons
            for emit in turned.commands:
                if isinstance(emit, Emit):
                    for (name, _), token_ids in zip(emit.ids, emit.tokens, strict=True):
                        self.tokens[name] += token_ids
                    self.ends.update({end.id: end for end in emit.finished})

    def reported(self) -> list[Event]:
        """What the engine was told of pauses in the last turn."""
        return [event for event in self.driver.last_events if isinstance(event, Pause)]

    @property
    def slow(self) -> set[str]:
        return {name for name, _ in self.masks._slow}

    def lengths(self, *names: str) -> list[int]:
        return [len(self.tokens[name]) for name in names]


def plain(name: str = "p") -> Request:
    return Request(id=name, prompt=(5,), max_tokens=100)


def on(name: str) -> Pause:
    return Pause(name, 0, paused=False)
