"""Kernels and graphs before they are needed, with a stand-in for captures."""

import logging
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minfer.effects.execution.cuda import graphs
from minfer.effects.execution.cuda.graphs import GraphCache
from minfer.effects.execution.device.device_rows import SamplingNeeds
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running import background
from minfer.effects.execution.running.shortcuts import SPOILED_MESSAGE
from minfer.effects.execution.warming import dummy_steps
from minfer.effects.execution.warming import warm_up as module
from minfer.effects.execution.warming.dummy_runner import DummyRunner
from minfer.effects.execution.warming.start_progress import GRAPHS, KERNELS, StartProgress
from minfer.effects.execution.warming.warm_up import Readiness, WarmUp
from minfer.kernels import compiling as kernels
from tests.effects.execution.tiny_engine import Model, Run, Tokens, requests

pytestmark = [
    pytest.mark.usefixtures("device_kind"),
    pytest.mark.parametrize("device_kind", ["cuda"], indirect=True),
]
GREEDY = SamplingNeeds(filtered=False, scored=False)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[StepShape]:
    """What was captured, as far as that is possible without a GPU."""
    shapes = list[StepShape]()

    def capture(
        self: Any, shape: StepShape, step: Callable[[StepShape], None]
    ) -> SimpleNamespace:
        shapes.append(shape)
        graph = self.graphs[shape] = SimpleNamespace(replay=lambda: step(shape))
        self.forget(shape)
        return graph

    monkeypatch.setattr(GraphCache, "capture", capture)
    return shapes


@pytest.fixture
def run(model: Model) -> Run:
    engine_run = Run.start(model, depth=1)
    executor: Any = engine_run.driver.executor
    executor.runner.__dict__.pop("_replay", None)
    executor.runner.shortcuts.graphs = executor.runner.keeps_logits = True
    return engine_run


def warm_up(run: Run, reports: list[StartProgress], seconds: float = 60) -> WarmUp:
    executor: Any = run.driver.executor
    return WarmUp(
        executor.dummy_runner, Readiness(reports.append, GREEDY, capturing=seconds)
    )


def compiling(monkeypatch: pytest.MonkeyPatch, *failed: str) -> None:
    """Dummy steps are not made: in the middle of a run they would change something."""

    def compiled(
        launch: Callable[[], None], report: Callable[[int], None]
    ) -> kernels.CompileResult:
        launch()
        for num_done in (1, 2):
            report(num_done)
        return kernels.CompileResult(2, 1, 0.5, failed)

    monkeypatch.setattr(kernels, "compile_launches", compiled)
    monkeypatch.setattr(module, "launch_dummy_steps", lambda _: None)


@pytest.mark.long
def test_it_changes_nothing_but_what_is_ready(
    run: Run,
    reference: Tokens,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling(monkeypatch)
    reports = list[StartProgress]()
    work = warm_up(run, reports)
    work.prepare()
    work.before_ready()
    assert [report for report in reports if report.stage == KERNELS] == [
        StartProgress(KERNELS, num_done, 0) for num_done in range(3)
    ]
    graphs = [report for report in reports if report.stage == GRAPHS]
    assert [report.done for report in graphs] == sorted(report.done for report in graphs)
    assert len({*captured}) == len(captured) == len(graphs) == graphs[-1].total
    assert {(shape.keeps_logits, shape.deferred_draws) for shape in captured} == {
        (True, False),
        (False, True),
    }
    assert run.serve(requests(0)) == reference
    runner: Any = run.driver.executor.runner  # type: ignore[attr-defined]
    assert not runner.captures.launched  # nothing was missing
    # In the middle of a run, between two requests, it changes nothing either.
    runner.captures.graphs.clear()
    warm_up(run, reports).before_ready()
    repeated = run.serve([requests(0)[1]])
    assert repeated["r1", 0][len(reference["r1", 0]) :] == reference["r1", 0]


@pytest.mark.long
def test_with_no_time_the_rest_comes_piece_by_piece_what_was_missed_first(
    run: Run, captured: list[StepShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling(monkeypatch)
    monkeypatch.setattr(graphs, "MIN_SPENT_CAPTURES", math.inf)
    work = warm_up(run, [], seconds=0)
    work.before_ready()
    assert not captured
    run.serve(requests(0)[:1])
    runner: Any = run.driver.executor.runner  # type: ignore[attr-defined]
    missed = runner.captures.wanted()
    assert missed
    assert not captured  # no step waited for that
    while work.capture_one():
        pass
    assert captured[: len(missed)] == missed
    assert len(captured) > 20
    assert not work.capture_one()


def test_kernels_that_cannot_be_compiled_ahead_are_logged(
    run: Run,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiling(monkeypatch, "product: no room", "attend: no room")
    work = warm_up(run, [], seconds=0)
    with caplog.at_level(logging.INFO, "minfer.executor"):
        work.prepare()
    assert caplog.messages == [
        "2 kernels, 1 of them compiled, in 0.5 s",
        "2 kernels are left to their first use: product: no room",
    ]
    caplog.clear()
    monkeypatch.setattr(kernels, "compile_launches", None)
    work.prepare()
    assert len(caplog.messages) == 1
    assert "compiled one by one, as they are needed: TypeError" in caplog.messages[0]
    assert not captured


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "graphs", "says"),
    [
        (RuntimeError("no"), False, "CUDA graphs cannot be used here"),
        (torch.OutOfMemoryError("full"), True, "no more graphs are captured"),
    ],
)
def test_a_capture_that_fails_is_the_last(
    run: Run,
    reference: Tokens,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    graphs: bool,
    says: str,
) -> None:
    compiling(monkeypatch)
    tried = list[StepShape]()

    def capture(_: Any, shape: StepShape, __: Any) -> None:
        tried.append(shape)
        raise error

    monkeypatch.setattr(GraphCache, "capture", capture)
    work = warm_up(run, [])
    work.before_ready()
    assert not work.capture_one()
    assert len(tried) == 1
    assert says in caplog.text
    executor: Any = run.driver.executor
    assert executor.runner.shortcuts.graphs == graphs
    assert run.serve(requests(0)) == reference
    assert not captured


@pytest.mark.long
def test_a_capture_that_was_spoiled_comes_again(
    run: Run, captured: list[StepShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling(monkeypatch)
    inner, tried = GraphCache.capture, list[StepShape]()

    def capture(self: Any, shape: StepShape, step: Any) -> Any:
        tried.append(shape)
        if len(tried) == 1:
            raise RuntimeError(f"operation failed {SPOILED_MESSAGE}")
        return inner(self, shape, step)

    monkeypatch.setattr(GraphCache, "capture", capture)
    work = warm_up(run, [])
    work.before_ready()
    while work.capture_one():
        pass
    assert tried.count(tried[0]) == 2
    assert sorted(map(repr, captured)) == sorted(map(repr, {*tried}))


@pytest.mark.long
def test_a_rest_has_what_came_after_all_was_captured(
    run: Run,
    reference: Tokens,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work had ended, and its thread: unforeseen shapes start it again."""
    compiling(monkeypatch)
    monkeypatch.setattr(background, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(graphs, "MIN_SPENT_CAPTURES", math.inf)
    executor: Any = run.driver.executor
    executor._warm_up(Readiness(capturing=60.0))
    thread = executor.background.thread
    thread.join(5)
    assert not thread.is_alive()
    executor.runner.captures.graphs.clear()
    captured.clear()
    run.serve(requests(0)[:1])
    end = time.monotonic() + 30
    while executor.runner.captures.launched:
        assert time.monotonic() < end, "no rest was used"
        time.sleep(0.005)
    assert captured
    assert run.tokens["r0", 0] == reference["r0", 0]
    executor.close()


@pytest.mark.long
def test_an_executor_goes_on_in_quiet_moments_until_it_is_closed(
    run: Run,
    reference: Tokens,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling(monkeypatch)
    monkeypatch.setattr(background, "QUIET_SECONDS", 0.01)
    executor: Any = run.driver.executor
    reports = list[StartProgress]()
    executor._warm_up(Readiness(reports.append, capturing=0.0))
    assert {report.stage for report in reports} == {KERNELS}
    assert not captured
    assert run.serve(requests(0)) == reference  # whatever is captured meanwhile
    end = time.monotonic() + 30
    while len(captured) < 20:
        assert time.monotonic() < end
        time.sleep(0.005)
    executor.close()
    count = len(captured)
    assert not executor.background.thread.is_alive()
    assert len(captured) == count


@pytest.mark.long
def test_the_largest_steps_run_before_ready_and_change_nothing(
    run: Run,
    reference: Tokens,
    captured: list[StepShape],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiling(monkeypatch)
    executor: Any = run.driver.executor
    runner = executor.runner
    runner.captured = 32  # of 64 tokens of a step
    inner, shapes = DummyRunner.dummy_step, list[StepShape]()

    def dummy_step(self: DummyRunner, shape: StepShape) -> None:
        shapes.append(shape)
        if len(shapes) == 4:
            raise RuntimeError("no")
        inner(self, shape)

    monkeypatch.setattr(DummyRunner, "dummy_step", dummy_step)
    monkeypatch.setattr(dummy_steps, "USUAL_ROWS", 8)
    monkeypatch.setattr(dummy_steps, "USUAL_PROMPT_TOKENS", 16)
    work = warm_up(run, [], seconds=0)
    work.prepare()
    assert [
        (shape.decode_rows, shape.tokens, shape.chunks, shape.longest) for shape in shapes
    ] == [(0, 64, 1, 64), (8, 56, 4, 14)]
    assert all(bool(shape.splits) == bool(shape.decode_rows) for shape in shapes)
    caplog.clear()
    runner.captured = 64
    work.prepare()
    assert len(shapes) == 2, "all steps have graphs"
    runner.captured = 32
    work.prepare()
    [warning] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning == (
        "a step of 8 decode rows, 56 prefill tokens, 4 chunks, 12 draws, "
        f"splits {shapes[1].splits} failed: RuntimeError('no')"
    )
    assert not captured
    assert run.serve(requests(0)) == reference
