"""What selective_scan.py and its kernel compute with."""

from typing import NamedTuple

from torch import Tensor

from minfer.kernels.paged_states import PagedUnits
from minfer.kernels.state_work import StateWork


class ScanWeights(NamedTuple):
    """What is learned of a scan; all float32."""

    bias: Tensor  # [channels], of steps
    rates: Tensor  # [channels, N]: exp(A_log)
    skip: Tensor  # [channels]


class ScanArguments(NamedTuple):
    """The arguments of `selective_scan`."""

    x: Tensor
    raw: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor
    weights: ScanWeights
    units: PagedUnits
    work: StateWork
