"""What an executor may be sent besides what the engine plans: drafts to verify, and
moves.

The engine plans neither yet. So the worlds have a proposer and a mover that add them to
plans on their way to the oracle: whatever they add, outputs must be as without. A
proposer turns several decode steps in one plan into one step that verifies drafts; a
mover takes blocks that no row of the step reads to another tier, spoils what was left
behind, and brings them back before a plan touches them. Some worlds also send every plan
and result through its wire form.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from attrs import define, evolve, field, frozen

from minfer.records.config import CacheGroup
from minfer.records.messages import Executed, Failed
from minfer.records.plan import (
    DEVICE,
    Draft,
    Mask,
    Move,
    Open,
    Plan,
    SampleDeferred,
    Stand,
)
from minfer.records.request import Request, row_sampling
from minfer.records.sequence import SampleId
from minfer.runs.oracle import Oracle, OracleRow
from minfer.runs.wire import plan_from, plan_to, results_from, results_to

HOST: Final = "host"  # a tier
NOWHERE: Final = "nowhere"  # one that holds nothing: what comes from there is spoilt
MASKED: Final = 2**17  # tokens of a vocabulary, up to which masks are spelled out

Foresee = Callable[[SampleId], tuple[int, ...]]  # all tokens of a sample, to come as well


def opened(request: Request, table: tuple[int, ...] = (), sample: int = 0) -> Open:
    """A row, the first of a plan, that is opened for a request."""
    return Open(
        index=0,
        name=(request.id, sample),
        known=request.prompt + request.output,
        prompt=len(request.prompt),
        last=len(request.prompt) + request.max_tokens - 1,
        sampling=row_sampling(request, sample),
        tables=(table,),
    )


@define
class Mover:
    """Keeps blocks in another tier while no row reads them."""

    rng: Random
    away: dict[int, int] = field(factory=dict)  # block -> its number in the other tier
    numbers: int = 0

    def __call__(self, plan: Plan, oracle: Oracle) -> Plan:
        """The plan with moves: back what it touches, and away what it does not."""
        touched = self._touched(plan, oracle)
        wanted = sorted(touched & self.away.keys())
        back = [Move(self.away.pop(block), block, HOST) for block in wanted]
        idle = sorted(oracle.memory.keys() - touched - self.away.keys())
        gone = self.rng.sample(idle, min(len(idle), self.rng.choice((0, 0, 1, 3))))
        out: list[Move] = []
        for block in gone:
            self.numbers += 1
            self.away[block] = self.numbers
            out += [Move(block, self.numbers, tier=HOST), Move(0, block, NOWHERE)]
        return evolve(plan, moves=(*back, *out))

    @staticmethod
    def _touched(plan: Plan, oracle: Oracle) -> set[int]:
        """Blocks that a plan's rows may read or write, or that it copies."""
        opened = {plan.rows[one.index] for one in plan.opens}
        tables = [
            table for row in set(plan.rows) - opened for table in oracle.rows[row].tables
        ]
        tables += [list(table) for one in plan.opens for table in one.tables]
        tables += [list(grow.blocks) for grow in plan.grows]
        tables += [[copy.source, copy.target] for copy in plan.copies]
        return {block for table in tables for block in table}


@frozen
class Habits:
    """How an executor of the worlds differs from the plain oracle."""

    mover: Mover | None = None
    wire: bool = False  # plans and results cross as bytes


class Busy(Oracle):
    """An oracle with habits. It counts what came of them in `seen`."""

    def __init__(
        self,
        habits: Habits,
        block_size: int,
        vocab: int,
        groups: tuple[CacheGroup, ...],
    ) -> None:
        super().__init__(block_size, vocab, groups)
        self.habits = habits
        self.seen = Counter[str]()

    def launch(self, plan: Plan) -> None:
        """Queue the plan, and allow at once what is sampled apart."""
        super().launch(plan_from(plan_to(plan)) if self.habits.wire else plan)
        if plan.deferred:
            self.seen["sampled apart"] += 1
            # Of 2^31 tokens it is 256 MB; one without bits means the same.
            few = self.vocab <= MASKED
            everything = b"\xff" * (self.vocab // 8 + 1) if few else b""
            masks = (Mask(plan.deferred[0], everything),)
            reported = SampleDeferred(plan.step, masks, stands=tuple(self._stands(plan)))
            self.sample(reported)

    def _stands(self, plan: Plan) -> Iterator[Stand]:
        """The host has masks for only some places of rows that are sampled apart. Draws
        of its own: seeds keep their worlds.
        """
        rng = Random(f"stands {plan.step}")
        for draft in plan.drafts:
            if draft.index in plan.deferred:
                self.seen["drafts sampled apart"] += 1
                if rng.random() < 0.2:
                    yield Stand(draft.index, rng.randrange(plan.counts[draft.index]))

    def collect(self) -> Executed | Failed:
        """Run the next plan."""
        done = super().collect()
        return results_from(results_to(done)) if self.habits.wire else done

    def _run(self, plan: Plan) -> Iterator[tuple[int, ...]]:
        habits = self.habits
        if habits.mover is not None:
            plan = habits.mover(plan, self)
            self.seen["moved away"] += any(move.origin == DEVICE for move in plan.moves)
            self.seen["moved back"] += any(move.origin == HOST for move in plan.moves)
        return super()._run(plan)

    def _verified(
        self, row: OracleRow, start: int, draft: Draft, count: int, masks: list[bytes]
    ) -> Iterator[int]:
        accepted = -1
        for token in super()._verified(row, start, draft, count, masks):
            accepted += 1
            yield token
        self.seen["drafts accepted"] += accepted > 0
        self.seen["drafts rejected"] += accepted < count
