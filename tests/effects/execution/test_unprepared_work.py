"""What steps did that was not prepared: counted, and in the log."""

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from minfer.effects.execution.contract import counts_of
from minfer.effects.execution.cuda.graphs import GraphCache
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running import unprepared_work
from minfer.effects.execution.running.unprepared_work import (
    ALLOCATED_BYTES,
    ALLOCATIONS,
    CAPTURES,
    COMPILATIONS,
    LAUNCHES,
    MISSING,
    SECONDS,
    TOO_LARGE,
    DeviceMemory,
    UnpreparedWork,
)
from minfer.kernels.compiling import Compilation, Compilations
from minfer.records.request import Request
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import Model, Run, Tokens, requests

DECODE = StepShape(decode_rows=4, draws=4)
PROMPT = StepShape(decode_rows=2, draws=3, tokens=64, chunks=1, longest=64, filtered=True)


@pytest.fixture
def work() -> UnpreparedWork:
    return UnpreparedWork(torch.device("cpu"), Compilations())


def owner(name: str) -> Any:
    return opened(Request(id=name, prompt=(1,), max_tokens=2), (0,))


def test_a_prepared_step_logs_nothing(
    work: UnpreparedWork, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "minfer.executor"):
        work.end_step(1, [owner("a")])
    assert not caplog.messages
    assert not any(work.totals().values())


def test_a_step_logs_all_that_it_did_with_its_requests(
    work: UnpreparedWork,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = [DeviceMemory(3, 5 << 20), DeviceMemory(3, 5 << 20), DeviceMemory(5, 7 << 20)]
    monkeypatch.setattr(DeviceMemory, "of", lambda _: held.pop(0))
    work.restart()
    ident = threading.get_ident()
    work.compilations.append(Compilation("attend", 0.412, ident))
    work.compilations.append(Compilation("others", 9.0, ident + 1))
    with caplog.at_level(logging.DEBUG, "minfer.executor"):
        work.note_launch(PROMPT, MISSING, 0.0213)
        work.note_capture(DECODE, 0.038)
        work.end_step(812, [owner("b"), None, owner("a"), owner("b")])
        work.end_step(813, [owner("a")])
    [message] = caplog.messages
    assert message == (
        "step 812 of b, a: launched without a graph, as it has none yet: 2 decode rows, "
        "64 prefill tokens, 1 chunk, 3 draws, filtered, 21.3 ms; captured a graph of "
        "4 decode rows, 4 draws, 38.0 ms; took 2.0 MiB from the device in 2 allocations; "
        "compiled attend, 412 ms"
    )
    assert work.totals() == pytest.approx({
        LAUNCHES: 1,
        LAUNCHES + SECONDS: 0.0213,
        CAPTURES: 1,
        CAPTURES + SECONDS: 0.038,
        COMPILATIONS: 1,
        COMPILATIONS + SECONDS: 0.412,
        ALLOCATIONS: 2,
        ALLOCATED_BYTES: 2 << 20,
    })  # fmt: skip


def test_a_large_prompt_is_logged_and_not_counted(
    work: UnpreparedWork, caplog: pytest.LogCaptureFixture
) -> None:
    large = evolve(PROMPT, tokens=9000, filtered=False, adapters=True, splits=(2,))
    with caplog.at_level(logging.DEBUG, "minfer.executor"):
        work.note_launch(large, TOO_LARGE, 0.2)
        work.end_step(1, [owner(f"r{i}") for i in range(10)])
    [message] = caplog.messages
    assert message == (
        "step 1 of r0, r1, r2, r3, r4, r5, r6, r7 and 2 more: launched without a graph, "
        "as it is too large for one: 2 decode rows, 9,000 prefill tokens, 1 chunk, "
        "3 draws, with adapters, splits (2,), 200.0 ms"
    )
    assert not any(work.totals().values())


def test_without_debugging_lines_it_counts_all_the_same(
    work: UnpreparedWork, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minfer.executor"):
        work.note_launch(DECODE, MISSING, 0.02)
        work.end_step(1, [])
    assert not caplog.messages
    assert not work.parts
    assert work.totals()[LAUNCHES] == 1
    work.restart()
    assert not any(work.totals().values())


@pytest.mark.long
@pytest.mark.usefixtures("device_kind")
@pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
def test_each_shape_is_launched_once_captured_once_and_replayed(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As far as that is possible without a GPU."""
    run = Run.start(model, depth=1)
    executor: Any = run.driver.executor
    runner = executor.runner
    runner.__dict__.pop("_replay", None)
    if executor.background is not None:
        executor.background.close()
    runner.captures.graphs.clear()
    runner.unprepared.restart()
    runner.shortcuts.graphs = True
    captured = list[StepShape]()

    def capture(
        self: GraphCache, shape: StepShape, step: Callable[[StepShape], None]
    ) -> Any:
        captured.append(shape)
        graph: Any = SimpleNamespace(replay=lambda: step(shape))
        self.add(shape, graph)
        self.forget(shape)
        return graph

    monkeypatch.setattr(GraphCache, "capture", capture)
    monkeypatch.setattr(GraphCache, "is_due", lambda self, shape: shape in self.spent)
    monkeypatch.setattr(unprepared_work, "is_gpu", lambda _: False)
    monkeypatch.setattr("minfer.effects.execution.torch_executor.is_gpu", lambda _: True)
    with caplog.at_level(logging.DEBUG, "minfer.executor"):
        assert run.serve(requests(0)) == reference
    counts = counts_of(executor)
    launched = {*captured, *runner.captures.launched}
    assert counts[LAUNCHES] == len(launched) > 3
    assert counts[CAPTURES] == len(captured) == len({*captured}) > 1
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert sum(line.count("launched without") for line in lines) == counts[LAUNCHES]
    assert sum(line.count("captured a graph") for line in lines) == counts[CAPTURES]
    assert all(" of r" in line for line in lines)
