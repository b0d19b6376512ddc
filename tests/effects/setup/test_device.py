"""Which device is taken, what is said when it cannot be, and the memory plan of a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.cli.main import main
from minfer.effects.setup.device import DeviceError, DeviceInfo, find_device
from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.engine_config import DEFAULT_BATCHED_TOKENS
from minfer.effects.setup.folders import bundled_folder
from minfer.effects.setup.memory import NotEnoughMemoryError, describe, plan_memory
from minfer.effects.setup.prepare import prepare
from minfer.records.config import EngineConfig
from tests.effects.setup.test_memory import QWEN_05B, SIZES

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU that torch can use; tests take away what they want."""
    has: dict[str, Any] = {"capability": (9, 0), "free": 130 * GIB, "total": 140 * GIB}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: has["capability"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU X")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (has["free"], has["total"]))
    monkeypatch.setattr("glob.glob", lambda name: ["/dev/nvidia0"] * ("nvidia" in name))
    return has


def test_the_gpu_is_taken_if_there_is_one(gpu: dict[str, Any]) -> None:
    for device in ("auto", "cuda"):
        assert find_device(device) == DeviceInfo(
            "cuda", "GPU X", gpu["total"], gpu["free"], (9, 0)
        )
    assert find_device("cpu") == DeviceInfo()


def test_a_gpu_under_windows_is_taken_too(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glob.glob", lambda name: ["/dev/dxg"] * ("dxg" in name))
    assert find_device("auto") == DeviceInfo(
        "cuda", "GPU X", gpu["total"], gpu["free"], (9, 0)
    )


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("trouble", ["build", "driver", "old", "full"])
def test_a_gpu_that_cannot_be_used(
    gpu: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    device: str,
) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check more.")

    def no_room(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    expected = {
        "build": "was built without CUDA; install a build with it",
        "driver": "Found no NVIDIA driver on your system. (torch",
        "old": r"compute capability is 7.5, and minfer's kernels need 8.0",
        "full": "CUDA error: out of memory (torch",
    }[trouble]
    if trouble == "build":
        monkeypatch.setattr(torch.version, "cuda", None)
    elif trouble == "driver":
        monkeypatch.setattr(torch.cuda, "init", no_driver)
    elif trouble == "full":
        monkeypatch.setattr(torch.cuda, "mem_get_info", no_room)
    else:
        gpu["capability"] = (7, 5)
    if device == "auto":
        assert find_device("auto") == DeviceInfo()
        assert expected in capsys.readouterr().err
    else:
        with pytest.raises(
            DeviceError, match="or run on the CPU with --device cpu"
        ) as caught:
            find_device("cuda")
        assert expected in str(caught.value)


def test_without_a_driver_the_cpu_is_taken_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("glob.glob", lambda _: [])
    assert find_device("auto") == DeviceInfo()
    assert not capsys.readouterr().err


def test_the_cli_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert main(["generate", "x", "--device", "cuda"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("minfer: no GPU can be used: torch")


# --- memory -----------------------------------------------------------------------------


def test_kv_fills_what_a_gpu_has_left() -> None:
    plan = plan_memory(QWEN_05B, SIZES, limit=40 * GIB, cuda=True)
    assert plan.workspace == 0
    assert plan.graphs > GIB
    assert 40 * GIB - plan.block_bytes < plan.total <= 40 * GIB
    larger_plan = plan_memory(QWEN_05B, SIZES, limit=41 * GIB, cuda=True)
    assert (larger_plan.num_blocks - plan.num_blocks) * plan.block_bytes == pytest.approx(
        GIB, rel=1e-3
    )
    assert "CUDA graphs, libraries" in describe(plan, "x")


def test_activations_grow_with_what_a_step_holds() -> None:
    def of(**changes: Any) -> int:
        sizes: EngineConfig = evolve(SIZES, **changes)
        plan = plan_memory(QWEN_05B, sizes, limit=None, cuda=True)
        return plan.activations

    assert of(max_num_batched_tokens=8192) - of(max_num_batched_tokens=4096) == 4096 * (
        2 * (3 * 896 + 3 * 4864)
    )
    wide = {"max_num_batched_tokens": 256}
    assert of(max_num_seqs=256, **wide) - of(max_num_seqs=128, **wide) > 128 * 151_936 * 2


def test_a_gpu_too_small_for_the_weights_or_for_one_sequence(gpu: dict[str, Any]) -> None:
    gpu.update(free=GIB, total=2 * GIB)
    with pytest.raises(NotEnoughMemoryError, match="leaves no room for a KV cache"):
        prepare(EngineArgs(device="cuda"))
    gpu.update(free=100 * GIB, total=140 * GIB)
    setup = prepare(EngineArgs(device="cuda", gpu_memory_utilization=0.5))
    assert setup.memory.limit == 70 * GIB - 40 * GIB
    assert setup.config.max_num_batched_tokens == DEFAULT_BATCHED_TOKENS["cuda"]
    with pytest.raises(NotEnoughMemoryError, match="--max-model-len"):
        prepare(EngineArgs(device="cuda", num_gpu_blocks_override=1))


def test_a_plan_for_a_gpu_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(bundled_folder()))
    assert (
        main(["plan", "--model", folder, "--device", "cuda", "--memory", "100GiB"]) == 0
    )
    shown = capsys.readouterr().out
    assert "of 100.00 GiB that may be used" in shown
    assert "CUDA graphs" in shown
