"""Which GPU kernels are for, where there is none."""

import threading

import pytest
import torch

from minfer.kernels.pdl import MOST, early
from minfer.kernels.target import HOPPER, NONE, aim, aim_here, aimed_at, capability

CPU, NOWHERE = torch.device("cpu"), torch.device("meta")


def test_it_is_what_somebody_said() -> None:
    assert capability(CPU) == NONE
    with aimed_at((8, 0)), aimed_at(HOPPER):
        assert capability(CPU) == capability(NOWHERE) == aim_here() == HOPPER
    assert aim_here() is None


def test_a_gpu_knows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lambda _: (12, 7)  # noqa: E731 - of torch
    monkeypatch.setattr(torch.cuda, "get_device_capability", found)
    with aimed_at(HOPPER):
        assert capability(torch.device("cuda", 93)) == (12, 7)


def test_each_thread_aims_by_itself() -> None:
    seen = list[object]()

    def look() -> None:
        seen.append(aim_here())
        aim((10, 0))
        seen.append(aim_here())

    with aimed_at(HOPPER):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert aim_here() == HOPPER
    assert seen == [None, (10, 0)]


def test_launches_are_early_from_hopper_on() -> None:
    few, many = torch.empty(MOST, 2), torch.empty(MOST + 1, 2)
    assert not early(few)
    for target, expected in (((8, 9), False), (HOPPER, True), ((10, 0), True)):
        with aimed_at(target):
            assert early(few) == expected
            assert not early(many)
