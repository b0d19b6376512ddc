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

_MIN_SECONDS: Final = 1e-9  # seconds


@frozen
class StepWork:
    """The amounts of a plan in which its cost is linear."""

    prefill_tokens: int
    decode_rows: int  # and drafts
    prefill_chunks: int
    read_positions: int  # that rows read
    attended_positions: int  # that prefill tokens attend to
    draft_forwards: int = 0  # of a draft model


def work_of(plan: Plan) -> StepWork:
    """The amounts of work of a plan."""
    rows, chunks = len(plan.rows), len(plan.fills)
    inputs, verified = sum(plan.num_scheduled_tokens), drafts_of(plan)
    attended = 0
    for fill in plan.fills:
        size = len(fill.tokens)
        attended += size * plan.starts[fill.index] + size * (size + 1) // 2
    return StepWork(
        prefill_tokens=inputs - rows + chunks - verified,
        decode_rows=rows - chunks + verified,
        prefill_chunks=chunks,
        read_positions=sum(plan.starts) + inputs,
        attended_positions=attended,
        draft_forwards=_draft_forwards(plan) if verified else 0,
    )


def drafts_of(plan: Plan) -> int:
    """The number of drafts that a plan verifies."""
    return sum(plan.num_scheduled_tokens[draft.index] - 1 for draft in plan.drafts)


def _draft_forwards(plan: Plan) -> int:
    """The most drafts of a row that a draft model makes."""
    num_inputs = plan.num_scheduled_tokens
    return max((num_inputs[d.index] - 1 for d in plan.drafts if not d.tokens), default=0)


def _cost(**options: Any) -> Any:
    return field(validator=number(0, prefix="cost model: "), **options)


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
    adapter: float = _cost(default=0.0)  # a load of an adapter into a slot
    overlaps: bool = True  # the device works while the host takes a turn

    def __attrs_post_init__(self) -> None:
        if not self.decode or not all(top > 0 and cost >= 0 for top, cost in self.decode):
            raise ConfigError("cost model: decode must be pairs of rows and seconds")

    def seconds(self, plan: Plan) -> float:
        """The device's time for a plan; more rows than the last bucket cost as much as
        that.
        """
        if not plan.fills and not plan.drafts:
            num_rows = len(plan.rows)
            return self.decode_seconds(num_rows, sum(plan.starts) + num_rows)
        work = work_of(plan)
        forward, token = self.mixed, self.token
        if not plan.fills:
            forward = self._decode(len(plan.rows) + drafts_of(plan))
        elif self.launch_seconds(plan):
            forward, token = self.eager, self.eager_token
        rows = self.sequence * work.decode_rows + self.chunk * work.prefill_chunks
        rows += self.context * work.read_positions + self.draft * work.draft_forwards
        prefill = token * work.prefill_tokens + self.attention * work.attended_positions
        return forward + rows + prefill

    def decode_seconds(self, rows: int, read_positions: int) -> float:
        """The device's time for a step of decode rows without drafts, which read
        `read_positions` of the KV cache together.
        """
        [seconds] = self.decode_times(rows, read_positions, 1)
        return seconds

    def decode_times(self, rows: int, read_positions: int, steps: int) -> list[float]:
        """`decode_seconds` of successive steps: each reads a position more per row."""
        forward, rows_cost = self._decode(rows), self.sequence * rows
        context = self.context
        positions = [read_positions + step * rows for step in range(steps)]
        return [forward + (rows_cost + context * read) for read in positions]

    def costs(self, max_inputs: int) -> Costs:
        """The costs by which the number of drafts is decided: forwards with up to
        `max_inputs` inputs, whatever they read.
        """
        all_sizes = {1, max_inputs, *(top for top, _ in self.decode)}
        all_sizes |= {1 << k for k in range(max_inputs.bit_length())}
        sizes = sorted(size for size in all_sizes if size <= max_inputs)
        modelled = (self._decode(size) + self.sequence * size for size in sizes)
        rising = accumulate((max(seconds, _MIN_SECONDS) for seconds in modelled), max)
        pairs = tuple(zip(sizes, rising, strict=True))
        return Costs(verify=pairs, draft=self.draft, fixed=self.host)

    def _decode(self, rows: int) -> float:
        """The time of a forward without prefill."""
        for top, seconds in self.decode:
            if rows <= top:
                return seconds
        return self.decode[-1][1]

    def launch_seconds(self, plan: Plan) -> float:
        """The host's time to launch a plan."""
        if self.launch and plan.fills and work_of(plan).prefill_tokens > self.captured:
            return self.launch
        return 0.0
