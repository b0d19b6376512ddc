"""Kernels run on the GPU if there is one, else under Triton's interpreter."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minfer import kernels

CUDA = torch.cuda.is_available()

if not CUDA:
    # tests/conftest.py sets it early enough, unless there is a GPU that torch cannot use.
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
        "no GPU, and Triton was imported without TRITON_INTERPRET=1: set it for these "
        "tests"
    )
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter replaces the functions of triton.language again whenever a kernel
    # calls another function, tl.sum included, which is most of its time. Once for each
    # launch is enough.
    patch_all = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    inside: list[bool] = []

    def patch_once(fn: object) -> Any:
        del fn
        if inside:  # a call within a kernel, whose scope is not restored
            return None
        scope = patch_all(everything)
        restore = scope.restore

        def leave() -> None:
            inside.clear()
            restore()

        inside.append(True)
        scope.restore = leave
        return scope

    interpreter._patch_lang = patch_once

    # The interpreter's own rounding to FP8 loses the carry to the exponent.
    convert = interpreter._convert_float

    def convert_rounded(values: Any, before: Any, after: Any, mode: Any) -> Any:
        if (before, after) != (tl.float32, tl.float8e4nv):
            return convert(values, before, after, mode)
        wide = torch.from_numpy(values.copy()).view(torch.float32)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_rounded


def ints(values: object, device: str) -> torch.Tensor:
    return torch.as_tensor(values).to(device, torch.int32)


def drawn(below: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(below, shape, generator=generator)


@pytest.fixture(autouse=True)
def interpreting() -> Iterator[None]:
    """Kernels are interpreted, and not replaced by their references, if there
    is no GPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "interpreting", not CUDA)
        yield


@pytest.fixture(params=["kernel", "reference"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors have to be for a public function to pick its kernel, or its
    reference.
    """
    if request.param == "kernel":
        return "cuda" if CUDA else "cpu"
    monkeypatch.setattr(kernels, "interpreting", False)
    return "cpu"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialised holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
