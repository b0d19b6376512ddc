"""What may not work here, and is done without."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cuda import cuda_attention
from minfer.effects.execution.cuda.graphs import GraphCache
from minfer.effects.execution.device import routes
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running import own_model, shortcuts
from minfer.effects.execution.running.shortcuts import (
    GRAPHS,
    MAX_SPOILED_CAPTURES,
    SPOILED_MESSAGE,
    Shortcuts,
)
from minfer.effects.models.architecture.model import forward as model_forward
from minfer.kernels import fused_linear, plain
from minfer.kernels.packages import FLASH, NAMES, QUACK
from minfer.records.messages import Discarded
from minfer.records.request import Request
from tests.effects.execution.tiny_engine import (
    GREEDY,
    Model,
    Run,
    Tokens,
    requests,
    serve_by_packages,
)

pytestmark = [
    pytest.mark.usefixtures("device_kind"),
    pytest.mark.parametrize("device_kind", ["cuda"], indirect=True),
]


def capturing(
    run: Run, monkeypatch: pytest.MonkeyPatch, *errors: Exception
) -> list[StepShape]:
    """Have the executor capture steps, as far as it can without a GPU; the first ones
    raise. Steps alone capture: a GPU's warm-up would take the errors.
    """
    executor: Any = run.driver.executor
    executor.runner.__dict__.pop("_replay", None)
    if executor.background is not None:
        executor.background.close()
    executor.runner.captures.graphs.clear()  # of the warm-up
    captured, left = list[StepShape](), list(errors)

    def due(self: GraphCache, shape: StepShape) -> bool:
        """As soon as a kind comes again: nothing is captured before it is ready."""
        return self.launched[shape] > 0 and shape not in self.graphs

    monkeypatch.setattr(GraphCache, "is_due", due)

    def capture(
        self: Any, shape: StepShape, step: Callable[[StepShape], None]
    ) -> SimpleNamespace:
        if left:
            raise left.pop(0)
        captured.append(shape)
        graph = self.graphs[shape] = SimpleNamespace(replay=lambda: step(shape))
        return graph

    monkeypatch.setattr(GraphCache, "capture", capture)
    return captured


@pytest.mark.long
def test_graphs_that_cannot_be_captured_are_done_without(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run.start(model, depth=1)
    assert not capturing(run, monkeypatch, RuntimeError("no"), RuntimeError("again"))
    assert run.serve(requests(0)) == reference
    assert run.count(Discarded) == 1
    assert not run.driver.executor.runner.shortcuts.graphs  # type: ignore[attr-defined]
    assert caplog.messages == [
        f"{GRAPHS} cannot be used here, and is not from now on: no"
    ]


def test_captures_that_others_spoil_are_tried_again_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoiled = RuntimeError(f"Triton Error [CUDA]: operation failed {SPOILED_MESSAGE}")
    shortcuts = Shortcuts(graphs=True, flash=False, fused=False)
    for _ in range(MAX_SPOILED_CAPTURES):
        shortcuts.capture()
        shortcuts.blame(spoiled)
        assert shortcuts.graphs
    assert not caplog.messages
    shortcuts.blame(spoiled)
    assert not shortcuts.graphs


@pytest.mark.long
def test_graphs_for_which_memory_was_short_are_tried_again(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run.start(model, depth=1)
    captured = capturing(run, monkeypatch, torch.OutOfMemoryError("short"))
    assert run.serve(requests(0)) == reference
    assert run.count(Discarded) == 1
    assert captured
    assert len(set(captured)) == len(captured)
    assert not caplog.messages


@pytest.mark.skipif(torch.cuda.is_available(), reason="a warm-up takes the error")
def test_a_step_that_failed_is_not_captured_next_time(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [MemoryError()]

    def failing(*arguments: Any) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return model_forward(*arguments)

    monkeypatch.setattr(own_model, "forward", failing)
    run = Run.start(model, depth=1)
    captured = capturing(run, monkeypatch)
    request = Request(id="a", prompt=(3, 4, 5), max_tokens=3, sampling=GREEDY)
    tokens = run.serve([request])
    assert run.count(Discarded) == 1
    assert [shape.tokens for shape in captured] == [0]
    run.serve([evolve(request, id="b", prompt=(6, 7, 8))])
    assert [shape.tokens for shape in captured] == [0, 64]
    assert tokens["a", 0] == model.expected(request)


@pytest.mark.long
@pytest.mark.parametrize(("missing", "failed"), [("", 1), ("not importable", 0)])
@pytest.mark.parametrize("package", [FLASH, QUACK])
def test_a_package_that_fails_is_done_without(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    package: str,
    missing: str,
    failed: int,
) -> None:
    """It is to serve chunks, or steps, of 8 tokens and more."""

    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel")

    run = Run.start(model)
    executor: Any = run.driver.executor
    serve_by_packages(executor.runner, monkeypatch, flash_from=8)
    ways = executor.runner.shortcuts
    ways.flash, ways.fused = package == FLASH, package == QUACK
    monkeypatch.setattr(routes, "is_gated_faster", lambda tokens, _: tokens >= 8)
    monkeypatch.setattr(shortcuts, "load", lambda _: missing)
    monkeypatch.setattr(cuda_attention, "flash_attention", failing)
    for module in (fused_linear, plain):
        monkeypatch.setattr(module, "norm_gated", refusing(module.norm_gated, failing))
    assert run.serve(requests(0)) == reference
    assert run.count(Discarded) == failed
    assert (ways.flash, ways.fused) == (False, False)
    reported = (
        f"{NAMES[package]} cannot be used here, and is not from now on: "
        f"{missing or 'no kernel'}"
    )
    assert caplog.messages == [reported]


def refusing(
    serve: Callable[..., Tensor], failing: Callable[[], None]
) -> Callable[..., Tensor]:
    """A product that fails when quack is to serve it."""

    def served(*arguments: Any, fused: bool) -> Tensor:
        if fused:
            failing()
        return serve(*arguments, fused=fused)

    return served


@pytest.mark.long
def test_steps_with_deferred_rows_are_captured_too(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.start(model, depth=1)
    captured = capturing(run, monkeypatch)
    wanted_requests = [
        evolve(r, needs_host_mask=i % 2 == 0) for i, r in enumerate(requests(0))
    ]
    for prefix in ("", "again-", "once-more-"):  # mixed steps come twice
        tokens = run.serve([evolve(r, id=prefix + r.id) for r in wanted_requests])
        for request in wanted_requests:
            assert tokens[prefix + request.id, 0] == reference[request.id, 0]
    assert {(shape.keeps_logits, shape.tokens > 0) for shape in captured} >= {
        (True, False),
        (True, True),
    }
    assert len(set(captured)) == len(captured)
    assert not run.count(Discarded)


# --- alone ------------------------------------------------------------------------------


def some() -> Shortcuts:
    return Shortcuts(graphs=True, flash=True, fused=True)


def test_what_was_tried_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcuts, "load", lambda _: "")
    ways = some()
    ways.begin()
    assert ways.can_use(FLASH)
    ways.blame(RuntimeError("no kernel"))
    assert (ways.graphs, ways.flash, ways.fused) == (True, False, True)


def test_only_a_capture_is_blamed_and_memory_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shortcuts, "load", lambda _: "")
    ways = some()
    ways.begin()
    ways.capture()
    assert ways.can_use(QUACK)  # which has worked in this step before
    ways.blame(torch.OutOfMemoryError("short"))
    assert ways.graphs
    ways.blame(RuntimeError("no"))
    assert (ways.graphs, ways.flash, ways.fused) == (False, True, True)


def test_a_step_that_tried_nothing_blames_nothing() -> None:
    ways = some()
    ways.begin()
    ways.blame(RuntimeError("no"))
    assert (ways.graphs, ways.flash, ways.fused) == (True, True, True)
