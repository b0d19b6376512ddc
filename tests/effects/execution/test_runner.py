"""The model runner: what is compiled ahead, what packages are given, and two of them."""

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minfer.effects.execution import cuda_backend, shortcuts
from minfer.effects.execution.kinds import Kind
from minfer.kernels.packages import FLASH
from minfer.request import Request
from tests.effects.execution.tiny_engine import GREEDY, Model, Run, Tokens, requests
from tests.kernels.test_flash import stand_in

on_gpu = pytest.mark.parametrize("kind", ["cuda"], indirect=True)
pytestmark = pytest.mark.usefixtures("kind")


@on_gpu
@pytest.mark.parametrize("works", [True, False])
def test_what_is_compiled_ahead_changes_nothing(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    works: bool,
) -> None:
    run = Run.start(model)
    executor: Any = run.driver.executor
    steps, step = list[Kind](), executor.runner._step

    def noted(kind: Kind, dry: bool = False) -> None:
        assert dry
        steps.append(kind)
        step(kind, dry)

    def refused() -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("no C compiler")

    with monkeypatch.context() as patched:
        patched.setattr(executor.runner, "_step", noted)
        compiled = contextlib.nullcontext if works else refused
        patched.setattr(cuda_backend, "compiled", compiled)
        executor.runner.compile_ahead()
    prompts = sum(kind.tokens > 0 for kind in steps)
    assert bool(prompts) == works
    assert len(steps) == prompts + works
    said = (
        "kernels are compiled one by one, as they are needed: RuntimeError('no C "
        "compiler')"
    )
    assert caplog.messages == ([] if works else [said])
    assert run.serve(requests(0)) == reference


@on_gpu
def test_flash_attn_is_given_what_it_needs(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its stand-in: one chunk and several, from the beginning and from later on."""
    seen = set[tuple[bool, bool]]()

    def attend(*given: Any, **how: Any) -> None:
        counts = how["cu_seqlens_q"].diff()
        seen.add((len(counts) > 1, bool((how["seqused_k"] > counts).any())))
        stand_in(*given, **how)

    run = Run.start(model)
    executor: Any = run.driver.executor
    executor.runner.shortcuts.flash_from = 2
    executor.runner.captured = 0
    monkeypatch.setattr(shortcuts, "load", lambda _: "")
    monkeypatch.setitem(sys.modules, FLASH, SimpleNamespace(_flash_attn_fwd=attend))
    assert run.serve(requests(0)) == reference
    one = Request(
        id="x", prompt=tuple(range(3, 83)), max_tokens=3, sampling=GREEDY
    )  # in two steps
    assert run.serve([one])["x", 0] == model.expected(one)
    assert {(False, False), (False, True), (True, False)} <= seen
