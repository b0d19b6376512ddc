"""What steps cost: a model that is linear in what they do.

A step's cost is that of its forwards and of what they read and write: inputs from
history, rows that feed themselves, the positions that they attend to (`Work`). Where no
graph has been captured for it, launching it costs the host, too.

A draft is an input like a row's own token: to verify five costs what five more rows
would, but that their context is read once. A draft model runs once for each place that
any row has a draft in.
"""

from itertools import accumulate
from typing import Any, Final

from attrs import field, frozen

from minfer.checks import ConfigError, number
from minfer.plan import Plan
from minfer.speculate.length import Costs

_LEAST: Final = 1e-9  # seconds


@frozen
class Work:
    """What a plan's cost is linear in."""

    inputs: int  # from history
    alone: int  # rows that feed themselves, and drafts
    chunks: int  # of history
    read: int  # positions that rows read
    pairs: int  # positions that inputs from history attend to
    depth: int = 0  # forwards of a draft model


def work(plan: Plan) -> Work:
    """What a plan does."""
    rows, chunks = len(plan.rows), len(plan.fills)
    inputs, verified = sum(plan.counts), drafts_of(plan)
    attended = 0
    for fill in plan.fills:
        size = len(fill.tokens)
        attended += size * plan.starts[fill.index] + size * (size + 1) // 2
    return Work(
        inputs=inputs - rows + chunks - verified,
        alone=rows - chunks + verified,
        chunks=chunks,
        read=sum(plan.starts) + inputs,
        pairs=attended,
        depth=_depth(plan) if verified else 0,
    )


def drafts_of(plan: Plan) -> int:
    """How many drafts a plan verifies."""
    return sum(plan.counts[draft.index] - 1 for draft in plan.drafts)


def _depth(plan: Plan) -> int:
    """The most drafts of a row that are a draft model's to say."""
    mine = (plan.counts[d.index] - 1 for d in plan.drafts if not d.tokens)
    return max(mine, default=0)


def _cost(**how: Any) -> Any:
    return field(validator=number(0, of="cost model: "), **how)


@frozen(kw_only=True)
class CostModel:
    """What steps cost, in seconds, linear in `Work`. Raises ConfigError for what is below
    0.
    """

    name: str
    # a forward without history: rows, and drafts, up to; seconds
    decode: tuple[tuple[int, float], ...]
    mixed: float = _cost()  # a forward with inputs from history
    token: float = _cost()  # an input from history
    sequence: float = _cost(default=0.0)  # a row that feeds itself
    chunk: float = _cost(default=0.0)  # of a row's history
    context: float = _cost(default=0.0)  # a position that a row reads
    # a position that an input from history attends to
    attention: float = _cost(default=0.0)
    host: float = _cost(default=0.0)  # a turn of the host
    draft: float = _cost(default=0.0)  # a forward of the draft model
    # Of a step with more inputs from history than `captured`, if launching it, operation
    # by operation, takes the host `launch`, which so long learns of no other step's end:
    launch: float = _cost(default=0.0)
    captured: int = 0
    eager: float = _cost(default=0.0)  # its forward
    eager_token: float = _cost(default=0.0)  # an input from history
    overlaps: bool = True  # the device works while the host takes a turn

    def __attrs_post_init__(self) -> None:
        if not self.decode or not all(top > 0 and each >= 0 for top, each in self.decode):
            raise ConfigError("cost model: decode must be pairs of rows and seconds")

    def seconds(self, plan: Plan) -> float:
        """What the device takes for a plan; more rows than any bucket has cost as its
        last.
        """
        done = work(plan)
        forward, token = self.mixed, self.token
        if not plan.fills:
            forward = self._decode(len(plan.rows) + drafts_of(plan))
        elif self.launching(plan):
            forward, token = self.eager, self.eager_token
        rows = self.sequence * done.alone + self.chunk * done.chunks
        rows += self.context * done.read + self.draft * done.depth
        return forward + rows + token * done.inputs + self.attention * done.pairs

    def costs(self, most: int) -> Costs:
        """What drafts are decided by: forwards with up to `most` inputs, whatever they
        read.
        """
        sizes = {1, most, *(top for top, _ in self.decode)}
        sizes |= {1 << k for k in range(most.bit_length())}
        each = sorted(size for size in sizes if size <= most)
        took = (self._decode(size) + self.sequence * size for size in each)
        rising = accumulate((max(one, _LEAST) for one in took), max)
        pairs = tuple(zip(each, rising, strict=True))
        return Costs(verify=pairs, draft=self.draft, fixed=self.host)

    def _decode(self, rows: int) -> float:
        """A forward without history."""
        for top, seconds in self.decode:
            if rows <= top:
                return seconds
        return self.decode[-1][1]

    def launching(self, plan: Plan) -> float:
        """What launching a plan takes the host."""
        eager = self.launch and plan.fills and work(plan).inputs > self.captured
        return self.launch if eager else 0.0
