"""An engine with a host tier, turned by hand."""

from typing import Any

from attrs import evolve

from minfer.records.messages import Event, Move, Submit, Tick, TransferCommand
from minfer.records.plan import PrefillTokens
from minfer.records.request import Request
from minfer.records.state import Transition
from minfer.records.tiers import LOAD, HostTier
from tests.core.test_engine import CONFIG, Bench, ask

HOST = HostTier(pages=64, choice=LOAD)
TIGHT = evolve(CONFIG, num_blocks=8, host=HOST)


class Hosted(Bench):
    """Transfers end in the turn after they began, unless `late`."""

    def __init__(self, config: Any = TIGHT, **tier: Any) -> None:
        if tier:
            config = evolve(config, host=evolve(config.host, **tier))
        super().__init__(config)
        self.late = False
        self.moves: list[TransferCommand] = []
        self.events: tuple[Event, ...] = ()  # of the last turn

    def give(self, *events: Event) -> Transition:
        ended = () if self.late else self.ends()
        turn = super().give(*events, *ended)
        self.events = (Tick(self.clock), *events, *ended)
        for command in turn.commands:
            if isinstance(command, TransferCommand):
                self.moves.append(command)
                self.oracle.move(command)
        return turn

    def ends(self, error: str = "") -> tuple[Event, ...]:
        """The reports of all transfers in flight."""
        return tuple(
            [self.oracle.finish_move(0, error) for _ in range(len(self.oracle.moves))]
        )

    def serve(self, request: Request) -> tuple[int, ...]:
        """One request alone, to its end; and all transfers."""
        self.turn(Submit(request))
        self.settle()
        return self.out[request.id, 0]

    def settle(self) -> None:
        """Until nothing is left to be done."""
        self.drain()
        for _ in range(100):
            if not self.state.tiers.transfers and not self.state.tiers.host_queue:
                return
            self.turn()
        raise AssertionError(f"never settled: {self.state.tiers}")

    @property
    def loads(self) -> list[Move]:
        return [one for one in self.moves if isinstance(one, Move) and one.kind.to_device]

    @property
    def stores(self) -> list[Move]:
        return [
            one for one in self.moves if isinstance(one, Move) and not one.kind.to_device
        ]

    @property
    def computed(self) -> int:
        """Prefill tokens of all plans."""
        fills: list[PrefillTokens] = [fill for plan in self.plans for fill in plan.fills]
        return sum(len(fill.tokens) for fill in fills)

    def push_out(self) -> None:
        """Evict all that the device has cached."""
        for i in range(2):
            self.serve(ask(f"other{i}", prompt=(40 + i,) * 28, max_tokens=1))
