"""Adapters in the torch executor, run by the real engine: the tokens of the merged
models, whatever rows are beside them.
"""

import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.blocks.keys import root_key
from minfer.effects.execution.running.adapter_loader import AdapterRoom
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.models.adapters.peft_config import AdapterError
from minfer.effects.models.adapters.peft_files import read_adapter
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoaded,
    Discarded,
    LoadAdapter,
    Preempted,
)
from minfer.records.request import Request
from minfer.records.speculation import Speculation
from tests.effects.execution import tiny_engine
from tests.effects.execution.tiny_engine import Model, Run, Tokens, requests
from tests.effects.tiny_adapters import merged, write_adapter

pytestmark = pytest.mark.usefixtures("device_kind")
RANKS = (4, 7, 16)
ALPHA = 8


@frozen(eq=False)
class Written:
    """Adapters of the tiny model."""

    folders: dict[str, Path]  # by digest
    expected: Tokens
    requests: list[Request]


@pytest.fixture(scope="module")
def written(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Three adapters; requests that have one of them, or none."""
    folder = tmp_path_factory.mktemp("adapters")
    folders, models = {}, {"": model}
    for index, rank in enumerate(RANKS):
        path = folder / str(index)
        pairs = write_adapter(path, model.theirs, rank=rank, seed=index, lora_alpha=ALPHA)
        digest = read_adapter(path, model.spec, 16).digest.hex()
        folders[digest] = path
        models[digest] = evolve(model, theirs=merged(model.theirs, pairs, ALPHA / rank))
    digests = ["", *folders]
    made = [
        evolve(request, adapter=digest, root=root_key(b"tiny", b"", digest))
        for index, request in enumerate(requests(0, 12))
        for digest in [digests[index % len(digests)]]
    ]
    expected = {(r.id, 0): models[r.adapter].expected(r) for r in made}
    return Written(folders, expected, made)


def start(model: Model, written: Written, **settings: Any) -> Run:
    """An engine that has the adapters in host memory."""
    settings = {"adapter_slots": 2} | settings
    run = Run.start(model, **settings)
    executor: Any = run.driver.executor
    for digest, folder in written.folders.items():
        executor.add_adapter(bytes.fromhex(digest), str(folder))
    run.driver.load_adapter = waiting_load(executor)
    return run


def waiting_load(executor: TorchExecutor) -> Any:
    """Loads an adapter before it returns, so that no turn has to be waited for."""

    def load(command: LoadAdapter, report: Any) -> None:
        ended: SimpleQueue[Any] = SimpleQueue()
        executor.load_adapter(command, ended.put)
        report(ended.get(timeout=20))

    return load


@pytest.fixture(autouse=True)
def with_room(monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    room = AdapterRoom(model.spec, 16)

    def open_executor(*args: Any, **options: Any) -> TorchExecutor:
        return TorchExecutor(*args, **options, adapters=room)

    monkeypatch.setattr(tiny_engine, "TorchExecutor", open_executor)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adapter_slots": 1, "depth": 1},
        {"adapter_slots": 3, "max_num_batched_tokens": 17},
        {"num_blocks": 9},
        {"max_num_seqs": 3, "block_size": 5},
        {"speculation": Speculation(drafter="device", drafts=3, adaptive=False)},
    ],
    ids=str,
)
def test_rows_with_and_without_adapters(
    model: Model, written: Written, settings: dict[str, Any]
) -> None:
    settings = {**settings}
    if "speculation" in settings:  # the draft model has no adapters
        settings["draft"] = LoadedDraft(model.spec, model.weights)
    run = start(model, written, **settings)
    tokens = run.serve(written.requests, arrival_gap=1)
    assert {end.error for end in run.ends.values()} == {""}
    assert tokens == written.expected
    assert not run.count(Discarded)
    assert run.count(Preempted) or "num_blocks" not in settings


def test_an_adapter_that_is_not_in_host_memory_ends_its_requests_alone(
    model: Model, written: Written
) -> None:
    run = start(model, written)
    executor: Any = run.driver.executor
    missing = next(iter(written.folders))
    executor.remove_adapter(bytes.fromhex(missing))
    run.serve(written.requests)
    for request in written.requests:
        if request.adapter == missing:
            assert run.ends[request.id, 0].reason == "error"
            assert "not in host memory" in run.ends[request.id, 0].error
        else:
            name = request.id, 0
            assert run.tokens[name] == written.expected[name]


def test_files_of_another_adapter_are_refused(model: Model, written: Written) -> None:
    run = start(model, written)
    executor: Any = run.driver.executor
    folder = next(iter(written.folders.values()))
    with pytest.raises(AdapterError, match="another adapter than when"):
        executor.add_adapter(b"\1" * 32, str(folder))


def test_loads_report_from_another_thread(model: Model, written: Written) -> None:
    run = start(model, written)
    executor: Any = run.driver.executor
    ends: SimpleQueue[Any] = SimpleQueue()
    for adapter in (*written.folders, "00"):
        executor.load_adapter(
            LoadAdapter(adapter, 1),
            lambda end: ends.put((end, threading.current_thread())),
        )
    for adapter in written.folders:
        end, thread = ends.get(timeout=20)
        assert end == AdapterLoaded(adapter, 1)
        assert thread is not threading.current_thread()
    assert isinstance(ends.get(timeout=20)[0], AdapterFailed)


def test_no_adapter_no_adapter_shape(model: Model, written: Written) -> None:
    """Steps without adapters have the shapes, and so the graphs, of before."""
    run = start(model, written)
    executor: Any = run.driver.executor
    shapes = []
    step = executor.runner.step

    def note(shape: Any, *args: Any, **options: Any) -> None:
        shapes.append(shape)
        step(shape, *args, **options)

    executor.runner.step = note
    if hasattr(executor.runner._replay, "__wrapped__") or executor.runner._replay is step:
        executor.runner._replay = note
    run.serve([r for r in written.requests if not r.adapter])
    assert shapes
    assert not any(shape.adapters for shape in shapes)
    run.serve([evolve(r, id="a" + r.id) for r in written.requests if r.adapter])
    assert any(shape.adapters for shape in shapes)
