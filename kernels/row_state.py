"""The device's tensors that kernels read and write together, as records."""

from typing import NamedTuple

from torch import Tensor


class RowTensors(NamedTuple):
    """The state of rows between steps, [device rows] int32 each unless noted."""

    last: Tensor  # tokens
    next: Tensor  # positions of the last tokens
    table: Tensor  # [tables, device rows, blocks]: page ids
    scratch: int  # the row that pads batches, which never advances


class StepInputs(NamedTuple):
    """The input tokens of a step, [tokens] int32 unless noted."""

    tokens: Tensor  # ids
    positions: Tensor
    ahead: Tensor  # the positions after them
    slots: Tensor  # [tables, tokens] int64: where their keys and values go


class Penalties(NamedTuple):
    """The penalties of rows, [device rows] float32 each."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
