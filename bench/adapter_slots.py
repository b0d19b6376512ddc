"""Hundreds of adapters over a few slots of the device: the engine's own decisions on a
virtual clock, without a model.

A fixed number of clients ask again as soon as they are answered. Their adapters come in
rotation: each request has the next one, or some in a row have the same; or at random, a
few of them far more often than others (Zipf). Beside each stand the same requests with a
slot for each adapter, so that nothing waits for one (resident), and with no more rows
than slots: of requests that all have other adapters, no more can run at once.

A wait is counted in other loads that begin before a sample's own, and in stays of the
slots: loads divided by slots, rounded up. The bound that `minfer.records.adapters` states
is counted at each sample's arrival, apart from the engine: the samples ahead of it in the
queue.
"""

import argparse
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Any, Final

from attrs import define, evolve, field, frozen

from bench import results
from minfer.blocks.keys import root_key
from minfer.effects.runs.costs import H200
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Emit, LoadAdapter, Submit
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.simulation.simulate import ArrivalQueue, Simulated, Simulation

BLOCK: Final = 64
OPTIONS: Final = {
    "--adapters": 500,
    "--slots": 16,
    "--clients": 64,
    "--requests": 2000,
    "--prompt": 512,
    "--answer": 128,
    "--load": 0.005,  # seconds of a load: 80 MB from host memory
    "--row": 4,  # requests in a row with the same adapter
    "--zipf": 1.0,  # exponent of the random choice
    "--seed": 0,
}


@frozen
class Arrival:
    """The queue at the arrival of a request."""

    loads: int  # that had begun
    bound: int  # samples ahead


@define
class SlotWaits:
    """How many other loads begin while samples wait for their own adapter's."""

    loads: int = 0  # so far
    began: dict[str, int] = field(factory=dict)  # by adapter: loads before its last one
    arrivals: dict[str, Arrival] = field(factory=dict)  # by request
    longest: int = 0
    over: int = 0  # requests with more loads before their own than their bound

    def read(self, turn: Turn) -> None:
        """Fold a turn."""
        ahead = len(turn.before.waiting)
        for event in turn.events:
            if isinstance(event, Submit):
                self.arrivals[event.request.id] = Arrival(self.loads, ahead)
                ahead += 1
        for command in turn.transition.commands:
            if isinstance(command, LoadAdapter):
                self.began[command.adapter] = self.loads
                self.loads += 1
        run = turn.transition.state.running
        adapters = {seq.request.id: seq.request.adapter for seq in run.seqs}
        for reason in turn.transition.reasons:
            if isinstance(reason, Admitted):
                self._admitted(reason.id, adapters[reason.id])

    def _admitted(self, name: str, adapter: str) -> None:
        arrival = self.arrivals.pop(name)
        others = self.began[adapter] - arrival.loads  # below 0: it was there
        self.longest = max(self.longest, others)
        self.over += others > arrival.bound


def requests(args: argparse.Namespace, in_a_row: int) -> Iterator[Request]:
    """Requests with prompts of their own, whose adapters come in rotation, each for some
    `in_a_row`, or at random if that is 0.
    """
    rng, adapters, zipf = Random(args.seed), args.adapters, args.zipf
    weights = [*accumulate(1 / rank**zipf for rank in range(1, adapters + 1))]
    for number in range(args.requests):
        if in_a_row:
            chosen = number // in_a_row % adapters
        else:
            [chosen] = rng.choices(range(adapters), cum_weights=weights)
        adapter = f"{chosen:04x}"
        yield Request(
            id=str(number),
            prompt=tuple(rng.randrange(32_000) for _ in range(args.prompt)),
            max_tokens=args.answer,
            adapter=adapter,
            root=root_key(b"7B", b"", adapter),
        )


def serve(
    args: argparse.Namespace, name: str, in_a_row: int, slots: int, rows: int
) -> dict[str, Any]:
    """Serve all requests: output tokens a second, and the longest wait for a slot."""
    blocks = -(-(args.prompt + args.answer) // BLOCK)
    config = EngineConfig(
        num_blocks=2 * args.clients * blocks,
        block_size=BLOCK,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        adapter_slots=slots,
    )
    coming = requests(args, in_a_row)
    arrivals = ArrivalQueue((0.0, next(coming)) for _ in range(args.clients))
    cost = evolve(H200, adapter=args.load)
    waits, total_rows, steps, end = SlotWaits(), 0, 0, 0.0
    for turn in Simulation(config, Simulated(), cost, arrivals).turns():
        waits.read(turn)
        state = turn.transition.state
        total_rows += len(state.running)
        steps, end = steps + 1, state.time
        for emit in [c for c in turn.transition.commands if isinstance(c, Emit)]:
            for _ in emit.finished:
                if (following := next(coming, None)) is not None:
                    arrivals.append((state.time, following))
    return {
        "what": name,
        "slots": slots,
        "tokens_per_second": args.requests * args.answer / end,
        "rows": total_rows / steps,
        "loads": waits.loads,
        "longest_wait_loads": waits.longest,
        "longest_wait_stays": -(-waits.longest // slots),
        "waits_over_bound": waits.over,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for name, in_a_row in (
        ("in rotation", 1),
        (f"in rotation, {args.row} in a row", args.row),
        ("by Zipf", 0),
    ):
        sizes = (
            ("resident", args.adapters, args.clients),
            ("resident, rows as slots", args.adapters, args.slots),
            ("slots", args.slots, args.clients),
        )
        for what, slots, rows in sizes:
            runs.append(serve(args, f"{name}: {what}", in_a_row, slots, rows))
            results.show(runs[-1])
    return {"runs": runs}


if __name__ == "__main__":
    results.run("adapter_slots", measure, OPTIONS)
