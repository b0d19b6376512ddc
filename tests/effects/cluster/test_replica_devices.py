"""What each of several engines gets of the machine."""

import os
from pathlib import Path

import pytest

from minfer.effects.cluster.processes import replica_devices as devices
from minfer.effects.cluster.processes.replica_devices import (
    ReplicaDevice,
    replica_devices,
)
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.memory import CPU_SHARE
from minfer.effects.setup.visible_gpus import VISIBLE_VARIABLE, visible_gpus
from minfer.values.checks import ConfigError


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("3,1", ["3", "1"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
        ("", []),
        ("0,-1,2", ["0"]),
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    named: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, named)
    assert visible_gpus() == expected


def test_each_replica_gets_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, "5,3,4")
    monkeypatch.setenv(devices.THREADS_VARIABLE, "7")
    first, second = replica_devices([EngineArgs(), EngineArgs()])
    assert (first.gpus, second.gpus) == ("5", "3")
    with pytest.raises(ConfigError, match="4 engines need 4 GPUs, and 3 can be seen"):
        replica_devices([EngineArgs()] * 4)
    wide = EngineArgs(tensor_parallel_size=2)
    first, second = replica_devices([wide, EngineArgs()])
    assert (first.gpus, second.gpus) == ("5,3", "4")
    args = second.take(EngineArgs(journal="runs"))
    assert os.environ[VISIBLE_VARIABLE] == "4"
    assert os.environ[devices.THREADS_VARIABLE] == "7", "as it was given"
    assert (args.journal, args.gpu_memory_utilization) == (Path("runs/replica-1"), None)


def test_without_gpus_replicas_divide_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, "0")
    monkeypatch.delenv(devices.THREADS_VARIABLE, raising=False)
    monkeypatch.setattr(devices, "_num_cores", lambda: 7)
    first, *_ = replica_devices([EngineArgs(device="cpu")] * 3)
    args = first.take(EngineArgs())
    assert os.environ[devices.THREADS_VARIABLE] == "2"
    assert os.environ[VISIBLE_VARIABLE] == "0"
    assert args.gpu_memory_utilization == CPU_SHARE / 3
    settings = EngineArgs(gpu_memory_utilization=0.4)
    assert first.take(settings) == settings
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    with pytest.raises(ConfigError, match="and 0 can be seen"):
        replica_devices([EngineArgs(device="cuda")] * 2)


def test_the_only_engine_takes_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    (only,) = replica_devices([EngineArgs(device="cuda")])
    args = EngineArgs(journal="runs")
    before = dict(os.environ)
    assert (only, only.take(args), dict(os.environ)) == (ReplicaDevice(), args, before)
