"""The cost of steps: a linear model.

A step's cost is that of its forwards and of what they read and write: prefill tokens,
decode rows, the positions that they attend to (`StepWork`). If no graph was captured for
it, launching it costs host time, too.

A draft is an input like a row's own token: verifying five costs as much as five more
rows, but their context is read once. A draft model runs once for each place in which any
row has a draft.
"""

from itertools import accumulate
from typing import Any, Final

from attrs import field, frozen

from minfer.records.acceptance import Costs
from minfer.records.plan import Plan
from minfer.values.checks import ConfigError, number

_LEAST: Final = 1e-9  # seconds


@frozen
class StepWork:
    """The amounts of a plan in which its cost is linear."""

    inputs: int  # prefill tokens
    alone: int  # decode rows, and drafts
    chunks: int  # prefill chunks
    read: int  # positions that rows read
    pairs: int  # positions that prefill tokens attend to
    depth: int = 0  # forwards of a draft model


def work(plan: Plan) -> StepWork:
    """The amounts of work of a plan."""
    rows, chunks = len(plan.rows), len(plan.fills)
    inputs, verified = sum(plan.num_scheduled_tokens), drafts_of(plan)
    attended = 0
    for fill in plan.fills:
        size = len(fill.tokens)
        attended += size * plan.starts[fill.index] + size * (size + 1) // 2
    return StepWork(
        inputs=inputs - rows + chunks - verified,
        alone=rows - chunks + verified,
        chunks=chunks,
        read=sum(plan.starts) + inputs,
        pairs=attended,
        depth=_depth(plan) if verified else 0,
    )


def drafts_of(plan: Plan) -> int:
    """How many drafts a plan verifies."""
    return sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)


def _depth(plan: Plan) -> int:
    """The most drafts of a row that a draft model makes."""
    mine = (plan.num_scheduled_tokens[d.index] - 1 for d in plan.drafts if not d.tokens)
    return max(mine, default=0)


def _cost(**how: Any) -> Any:
    return field(validator=number(0, prefix="cost model: "), **how)


@frozen(kw_only=True)
class CostModel:
    """The cost of steps, in seconds, linear in `StepWork`. Raises ConfigError for values
    below 0.
    """

    name: str
    # a forward without prefill: rows, and drafts, up to; seconds
    decode: tuple[tuple[int, float], ...]
    mixed: float = _cost()  # a forward with prefill tokens
    token: float = _cost()  # a prefill token
    sequence: float = _cost(default=0.0)  # a decode row
    chunk: float = _cost(default=0.0)  # a prefill chunk
    context: float = _cost(default=0.0)  # a position that a row reads
    # a position that a prefill token attends to
    attention: float = _cost(default=0.0)
    host: float = _cost(default=0.0)  # a turn of the host
    draft: float = _cost(default=0.0)  # a forward of the draft model
    # Of a step with more prefill tokens than `captured`: launching it, operation by
    # operation, takes the host `launch`, during which it does not see the end of other
    # steps:
    launch: float = _cost(default=0.0)
    captured: int = 0
    eager: float = _cost(default=0.0)  # its forward
    eager_token: float = _cost(default=0.0)  # a prefill token
    overlaps: bool = True  # the device works while the host takes a turn

    def __attrs_post_init__(self) -> None:
        if not self.decode or not all(top > 0 and each >= 0 for top, each in self.decode):
            raise ConfigError("cost model: decode must be pairs of rows and seconds")

    def seconds(self, plan: Plan) -> float:
        """The device's time for a plan; more rows than the last bucket cost as much as
        that.
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
        """The costs by which the number of drafts is decided: forwards with up to `most`
        inputs, whatever they read.
        """
        sizes = {1, most, *(top for top, _ in self.decode)}
        sizes |= {1 << k for k in range(most.bit_length())}
        each = sorted(size for size in sizes if size <= most)
        took = (self._decode(size) + self.sequence * size for size in each)
        rising = accumulate((max(one, _LEAST) for one in took), max)
        pairs = tuple(zip(each, rising, strict=True))
        return Costs(verify=pairs, draft=self.draft, fixed=self.host)

    def _decode(self, rows: int) -> float:
        """The time of a forward without prefill."""
        for top, seconds in self.decode:
            if rows <= top:
                return seconds
        return self.decode[-1][1]

    def launching(self, plan: Plan) -> float:
        """The host's time to launch a plan."""
        eager = self.launch and plan.fills and work(plan).inputs > self.captured
        return self.launch if eager else 0.0
