"""The torch executor, run by the real engine: the same tokens as transformers, whatever
is set.
"""

import gc
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cpu.paged_attention import KVCache
from minfer.effects.execution.cuda.cuda_attention import CudaCache
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.packing.pack_plan import Packer
from minfer.effects.execution.running import own_model
from minfer.effects.execution.running.sampler import Sampler
from minfer.effects.models.architecture.model import forward as model_forward
from minfer.records.messages import Admitted, Cancel, Discarded, Failed, Preempted, Submit
from minfer.records.plan import Draft, Grow, Plan, PrefillTokens
from minfer.records.request import Request, SamplingParams
from tests.circles import claimed
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import (
    CUDA,
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    requests,
)
from tests.effects.tiny_families import greedy_tokens

pytestmark = pytest.mark.usefixtures("device_kind")


@pytest.mark.parametrize("depth", [1, 2, *claimed([3])])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 17},
        {"block_size": 1, "num_blocks": 400},
        {"block_size": 5},
        {"block_size": 64, "num_blocks": 12},
        {"num_blocks": 9},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(
    model: Model, reference: Tokens, settings: dict[str, int], depth: int
) -> None:
    run = Run.start(model, **settings, depth=depth)
    assert run.serve(requests(0), arrival_gap=depth % 2) == reference
    assert not run.count(Discarded)
    assert {end.reason for end in run.ends.values()} == {"stop", "length"}
    if settings == {"num_blocks": 9}:
        assert run.count(Preempted)


@pytest.mark.long
def test_greedy_tokens_are_those_of_generate(model: Model) -> None:
    wanted_requests = [
        evolve(r, sampling=GREEDY, stop_ids=frozenset()) for r in requests(1, 6)
    ]
    tokens = Run.start(model).serve(wanted_requests)
    for request in wanted_requests:
        expected = greedy_tokens(model.theirs, request.prompt, request.max_tokens)
        assert tokens[request.id, 0] == expected


@pytest.mark.long
def test_prefix_hits_give_the_same_tokens(model: Model, reference: Tokens) -> None:
    run = Run.start(model)
    run.serve(requests(0))
    repeated = [evolve(r, id="again-" + r.id) for r in requests(0)]
    tokens = run.serve(repeated)
    for request in requests(0):
        assert tokens["again-" + request.id, 0] == reference[request.id, 0]
    hits = [
        r.hit for r in run.reasons if isinstance(r, Admitted) and r.id.startswith("again")
    ]
    assert sum(hits) > 100


@pytest.mark.long
@pytest.mark.parametrize("length", [1, 8, 13, 16])
def test_samples_of_one_request_differ_and_are_each_right(
    model: Model, length: int
) -> None:
    sampling = SamplingParams(temperature=1.0, n=4)
    prompt = tuple(range(10, 10 + length))
    request = Request(
        id="n", prompt=prompt, max_tokens=12, n=4, sampling=sampling, seed=11
    )
    tokens = Run.start(model).serve([request])
    assert tokens == {("n", i): model.expected(request, i) for i in range(4)}
    assert len({tuple(t) for t in tokens.values()}) == 4


@pytest.mark.long
def test_a_cancelled_neighbour_changes_nothing(model: Model, reference: Tokens) -> None:
    run = Run.start(model)
    for request in requests(0):
        run.driver.post(Submit(request))
    run.turn()
    run.turn()
    run.driver.post(Cancel("r3"))
    tokens = run.serve([])
    assert run.ends["r3", 0].reason == "cancelled"
    del tokens["r3", 0]
    assert tokens == {name: t for name, t in reference.items() if name != ("r3", 0)}


@pytest.mark.long
@pytest.mark.parametrize(
    "error", [RuntimeError("not enough memory"), MemoryError()], ids=repr
)
@pytest.mark.parametrize("late", [False, True])
def test_a_failing_forward_fails_its_step_only(
    model: Model,
    reference: Tokens,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    late: bool,
) -> None:
    calls = 0

    def failing(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = model_forward(*arguments) if late or calls % 9 else None
        if calls % 9 == 0:
            raise error
        assert out is not None
        return out

    monkeypatch.setattr(own_model, "forward", failing)
    run = Run.start(model, num_blocks=20)
    assert run.serve(requests(0), arrival_gap=1) == reference
    voided = [reason for reason in run.reasons if isinstance(reason, Discarded)]
    assert voided
    assert {v.error for v in voided} == {repr(error)}


@pytest.mark.long
def test_what_earlier_owners_left_in_blocks_does_not_matter(
    model: Model, reference: Tokens
) -> None:
    for depth in (1, 2):
        run = Run.start(model, depth=depth, num_blocks=20)
        run.driver.executor.runner.cache.data.fill_(torch.nan)  # type: ignore[attr-defined]
        samples = Request(
            id="n",
            prompt=(9,) * 13,
            max_tokens=12,
            n=3,
            sampling=SamplingParams(n=3),
            seed=11,
        )
        tokens = run.serve([*requests(0), samples], arrival_gap=1)
        assert not run.count(Discarded)
        assert tokens == reference | {
            ("n", i): model.expected(samples, i) for i in range(3)
        }


@pytest.mark.long
@pytest.mark.parametrize("broken_step", [0, 30])
def test_only_a_request_whose_logits_are_not_finite_ends(
    model: Model, reference: Tokens, broken_step: int
) -> None:
    wanted_requests = [
        r for r in requests(0) if VOCAB - 1 not in r.prompt + tuple(reference[r.id, 0])
    ]
    assert len(wanted_requests) > 5
    embed = model.weights.embed.clone()
    embed[VOCAB - 1] = torch.nan
    broken = Model(model.theirs, model.spec, evolve(model.weights, embed=embed))
    prompt = [2] * 40
    prompt[broken_step] = VOCAB - 1
    bad = Request(id="bad", prompt=tuple(prompt), max_tokens=9, sampling=GREEDY)
    run = Run.start(broken, max_num_batched_tokens=16, num_blocks=12)
    tokens = run.serve([*wanted_requests[:3], bad, *wanted_requests[3:]], arrival_gap=1)
    assert {name: t for name, t in tokens.items() if t} == {
        (r.id, 0): reference[r.id, 0] for r in wanted_requests
    }
    end = run.ends["bad", 0]
    assert end.reason == "error"
    assert "logits are not finite for request 'bad' (sample 0)" in end.error
    assert run.count(Discarded) == run.config.max_failures


def test_a_failed_plan_takes_those_behind_it_along(
    model: Model, device_kind: str
) -> None:
    if device_kind != "cpu" and CUDA:
        pytest.skip("a GPU does not recover from a token outside the vocabulary")
    executor = Run.start(model).driver.executor
    data = executor.runner.cache.data.zero_()  # type: ignore[attr-defined]
    request = Request(id="x", prompt=(VOCAB + 1,), max_tokens=3)
    fill, opens = PrefillTokens(0, request.prompt), opened(request, (0,))
    executor.launch(Plan(0, (0,), (0,), (0,), (1,), (1,), (fill,), (opens,)))
    executor.launch(Plan(1, (0,), (0,), (1,), (1,), (1,)))
    result = executor.collect()
    assert isinstance(result, Failed)
    assert result.step == 0
    with pytest.raises(IndexError):
        executor.collect()
    assert not data.any()


@pytest.mark.long
def test_close_lets_go_of_the_device(model: Model) -> None:
    """A small tensor behind the cache, in its segment, would keep all of it from other
    engines.
    """
    run = Run.start(model)
    run.serve(requests(0))
    executor: Any = run.driver.executor
    run.driver.close()
    large = Tensor | DeviceRows | KVCache | CudaCache | Sampler | Packer
    held_objects = vars(executor) | vars(executor.runner)
    assert not [name for name, value in held_objects.items() if isinstance(value, large)]


@pytest.mark.long
def test_steady_decoding_leaves_no_garbage_for_the_collector(model: Model) -> None:
    run = Run.start(model)
    run.driver.post(Submit(Request(id="a", prompt=(3, 4), max_tokens=60)))
    for _ in range(10):
        run.turn()
    gc.freeze()  # what others left is no matter, and takes seconds to go through
    try:
        for _ in range(30):
            run.turn()
        assert gc.collect() == 0
    finally:
        gc.unfreeze()


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "drafts": {"drafts": (Draft(0, (5,)),)},
    "block table": {"grows": (Grow(0, 1, (5,), group=1),)},
}


@pytest.mark.parametrize("error_text", UNSUPPORTED)
def test_what_cannot_be_executed_yet_is_refused(model: Model, error_text: str) -> None:
    executor: Any = Run.start(model).driver.executor
    data = executor.runner.cache.data.zero_()
    plan = Plan(0, (0,), (0,), (0,), (1,), (1,), **UNSUPPORTED[error_text])
    executor.launch(plan)
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert failed.error.startswith("step 0: ")
    assert error_text in failed.error
    assert not data.any()


def test_adapters_and_groups_of_layers_are_refused(model: Model) -> None:
    executor = Run.start(model).driver.executor
    new_row = opened(Request(id="x", prompt=(5,), max_tokens=3), (0,))
    wrong = {
        "adapter": evolve(new_row, adapter_slot=0),
        "table": evolve(new_row, tables=((0,), (1,))),
    }
    for error_text, opens in wrong.items():
        fill = PrefillTokens(0, (5,))
        executor.launch(Plan(0, (0,), (0,), (0,), (1,), (1,), (fill,), (opens,)))
        failed = executor.collect()
        assert isinstance(failed, Failed)
        assert error_text in failed.error
