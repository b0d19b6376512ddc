"""Which GPU kernels are for."""

import pytest
import torch

from minfer.kernels import target
from minfer.kernels.pdl import MAX_EARLY_ROWS, early
from minfer.kernels.target import HOPPER, NONE, capability


def test_a_gpu_knows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = lambda _: (12, 7)  # noqa: E731 - of torch
    monkeypatch.setattr(torch.cuda, "get_device_capability", reported)
    assert capability(torch.device("cuda", 93)) == (12, 7)
    assert capability(torch.device("cpu")) == NONE


def test_launches_are_early_from_hopper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows, many_rows = (
        torch.empty(MAX_EARLY_ROWS, 2),
        torch.empty(MAX_EARLY_ROWS + 1, 2),
    )
    assert not early(few_rows)
    for other_capability, expected in (((8, 9), False), (HOPPER, True), ((10, 0), True)):
        monkeypatch.setattr(target, "default_capability", other_capability)
        assert early(few_rows) == expected
        assert not early(many_rows)
