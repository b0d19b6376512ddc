"""Pipeline stages with CUDA graphs, as threads of the CPU, with a stand-in for graphs."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from attrs import define, evolve, field

from minfer.effects.execution.cuda.graphs import GraphCache
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.rank_loop import run_rank_loop
from minfer.effects.execution.ranks.items import Item, item_from, item_to
from minfer.effects.execution.ranks.micro_batches import MicroBatchExecutor
from minfer.effects.execution.running.device_step import DeviceStep
from minfer.effects.execution.running.stage_buffers import StageBuffers
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.effects.live.engine.driver import Driver
from minfer.effects.models.architecture.spec_reader import parse_spec
from minfer.effects.models.layout.shapes import captured_tokens
from minfer.effects.models.ranks import Parallel, RankInfo
from minfer.records.config import EngineConfig
from minfer.records.request import LAST, PromptOnly, Request
from tests.effects.execution.tiny_engine import (
    VOCAB,
    Model,
    Run,
    requests,
)
from tests.effects.models.rank_threads import LIMIT, ThreadRanks, thread_ranks
from tests.effects.tiny_model import CONFIG

STAGES: Final = 2
CONFIGURED: Final = EngineConfig(
    num_blocks=64,
    block_size=8,
    max_model_len=96,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
)


@define(eq=False)
class FirstStage:
    """A thread that is the rank of the first stage, and rank 0's side of it."""

    executor: TorchExecutor
    items: "SimpleQueue[Item]" = field(factory=SimpleQueue)
    thread: Thread = field(init=False)
    error: BaseException | None = None

    def __attrs_post_init__(self) -> None:
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        items = SimpleNamespace(next=self.items.get)
        leader: Any = SimpleNamespace(items=lambda: items, send=lambda *_: None)
        try:
            run_rank_loop(self.executor, leader)
        except BaseException as error:
            self.error = error

    def broadcast(self, item: Item) -> None:
        """See `WorkerGroup`."""
        self.items.put(item_from(item_to(item)))

    def close(self) -> None:
        """See `WorkerGroup`."""
        self.thread.join(LIMIT)
        if self.error is not None:
            raise self.error


def rank_executor(model: Model, ranks: ThreadRanks, **settings: Any) -> TorchExecutor:
    """One rank's, which does as on a GPU."""
    rank_info, sizes = (
        ranks.rank_info,
        evolve(CONFIGURED, depth=CONFIGURED.depth * STAGES),
    )
    held_layers = rank_info.layers(len(model.spec.layers))
    layers = model.weights.layers[held_layers.start : held_layers.stop]
    weights = evolve(model.weights, layers=layers)
    spec = model.spec.for_rank(rank_info)
    executor = TorchExecutor(
        sizes, spec, weights, "cpu", kernels=True, ranks=ranks, **settings
    )
    executor.runs_at_once = True
    executor.runner.shortcuts.graphs = executor.runner.keeps_logits = True
    return executor


@define(eq=False)
class Stages:
    """An engine of two stages."""

    run: Run
    executors: list[TorchExecutor]  # by rank

    def capture(self) -> None:
        """Capture, on all ranks, what was launched without a graph."""
        executor = self.executors[0]
        for shape in executor.runner.captures.wanted():
            executor.capture(shape)


@contextmanager
def stages_of(model: Model) -> Iterator[Stages]:
    ranks, _ = thread_ranks(Parallel(pipeline=STAGES))
    first = rank_executor(model, ranks[1])
    first_stage = FirstStage(first)
    workers = SimpleNamespace(
        broadcast=first_stage.broadcast,
        await_ready=lambda: None,
        close=first_stage.close,
        remove_folder=lambda: None,
    )
    last = rank_executor(model, ranks[0], workers=workers)
    executor = MicroBatchExecutor(last, STAGES, VOCAB)
    yield Stages(Run(CONFIGURED, Driver(CONFIGURED, executor)), [last, first])
    last.close()


@define(eq=False)
class StandIn:
    """A graph: a step whose residual stream is in its stage's buffers."""

    step: DeviceStep
    ends: StageBuffers
    shape: StepShape

    @property
    def rank(self) -> int:
        return self.ends.ranks.rank_info.rank

    def replay(self) -> None:
        replays.append(self)
        self.ends.is_held = True
        self.step(self.shape)
        self.ends.is_held = False


replays: list[StandIn] = []


@pytest.fixture(params=[None, 0, 1])
def unable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """A rank that captures nothing."""
    rank: int | None = request.param

    def capture(self: Any, shape: StepShape, step: Any) -> None:
        ends: StageBuffers = step.model.ends
        assert ends.is_held  # else the graph would exchange, and replays, too
        step(shape)  # as a capture does, but that nothing runs
        if ends.ranks.rank_info.rank == rank:
            raise RuntimeError("no graph")
        self.add(shape, StandIn(step, ends, shape))
        self.forget(shape)

    monkeypatch.setattr(GraphCache, "capture", capture)
    replays.clear()
    return rank


def asked(seed: int) -> list[Request]:
    """Requests, some with deferred sampling."""
    return [
        evolve(request, needs_host_mask=i % 3 == 0)
        for i, request in enumerate(requests(seed, count=7))
    ]


def test_stages_with_graphs_say_what_one_process_says(
    model: Model, unable: int | None
) -> None:
    expected = {(request.id, 0): model.expected(request) for request in asked(0)}
    with stages_of(model) as stages:
        assert stages.run.serve(asked(0), arrival_gap=1) == expected
        assert not replays
        stages.capture()
        stages.run.tokens = {}
        assert stages.run.serve(asked(0), arrival_gap=1) == expected
    # All have ended: the first stage may have been behind.
    counts = Counter((request.rank, request.shape.deferred_draws) for request in replays)
    assert {*counts} == {*product({0, 1} - {unable}, (False, True))}
    if unable is None:
        assert all(
            counts[0, deferred] == counts[1, deferred] for deferred in (False, True)
        )


def test_a_step_that_is_not_finite_ends_no_other(model: Model) -> None:
    good = requests(1, count=1)[0]
    expected = model.expected(good)
    poison = min({*range(VOCAB)} - {*good.prompt, *expected})
    embed = model.weights.embed.clone()
    embed[poison] = torch.nan
    bad = evolve(good, id="bad", prompt=(poison, *good.prompt))
    weights = evolve(model.weights, embed=embed)
    with stages_of(evolve(model, weights=weights)) as stages:
        stages.run.serve([bad])
        assert stages.run.ends["bad", 0].reason not in ("stop", "length")
        for number in range(3):
            request = evolve(good, id=f"after {number}")
            assert stages.run.serve([request])[request.id, 0] == expected


def test_vectors_are_of_the_last_stage(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in memory that another stage does not write."""
    empty = torch.empty

    def unwritten(*sizes: Any, **keywords: Any) -> Any:
        vectors = empty(*sizes, **keywords)
        return vectors.fill_(torch.nan) if vectors.is_floating_point() else vectors

    monkeypatch.setattr(torch, "empty", unwritten)
    request = evolve(requests(1, count=1)[0], max_tokens=0, prompt_only=PromptOnly(LAST))
    with stages_of(model) as stages:
        for number in range(2):  # a stage that found another end does not go on
            stages.run.serve([evolve(request, id=str(number))])
            assert not stages.run.ends[str(number), 0].error


@pytest.mark.parametrize("layers", [28, 29])
def test_all_stages_pad_the_same_steps(layers: int) -> None:
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "vocab_size": 151_936}
    spec = parse_spec({**CONFIG, **sizes, "num_hidden_layers": layers})
    padded_steps = {
        captured_tokens(spec.for_rank(RankInfo(rank, Parallel(2, 2))), 8192)
        for rank in range(4)
    }
    assert len(padded_steps) == 1
