"""What the sampler computes: filters where a row has one, and nowhere else."""

from typing import Any

import pytest
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.cuda import cuda_backend
from minfer.kernels.sample import sample as draw
from minfer.records.request import Request, SamplingParams
from minfer.sampling import reference_sampler as sample
from tests.effects.execution.tiny_engine import (
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    requests,
)

on_gpu = pytest.mark.parametrize("device_kind", ["cuda"], indirect=True)
pytestmark = pytest.mark.usefixtures("device_kind")


def filters(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of the sampler, whether it filters; it must wherever a row asks for
    that.
    """
    calls_filtered = list[bool]()

    def spy(**arguments: Any) -> tuple[Tensor, Tensor]:
        device_rows, filtered = arguments["rows"].long(), arguments["filtered"]
        values = arguments["values"]
        top_k, top_p = values.top_k[device_rows], values.top_p[device_rows]
        narrow = (top_k > 0) & (top_k < VOCAB) | (top_p < 1)
        narrow |= values.deepest[device_rows].isfinite()
        noisy = values.temperature[device_rows] >= sample.GREEDY_BELOW
        assert filtered or not (narrow & noisy).any()
        calls_filtered.append(filtered)
        return draw(**arguments)

    monkeypatch.setattr(cuda_backend, "sample", spy)
    return calls_filtered


@pytest.mark.long
@on_gpu
def test_rows_that_request_filters_are_filtered(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered, run = filters(monkeypatch), Run.start(model, depth=2)
    assert run.serve(requests(0), arrival_gap=1) == reference
    for settings in ({"min_p": 0.2}, {"top_k": 3}, {"top_p": 0.5}):
        filtered.clear()
        request = Request(
            id=str(settings),
            prompt=(3, 4),
            max_tokens=9,
            sampling=SamplingParams(**settings),
        )
        assert run.serve([request])[request.id, 0] == model.expected(request)
        assert filtered
        assert all(filtered)


@on_gpu
def test_filters_that_keep_all_do_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    filtered, run = filters(monkeypatch), Run.start(model, depth=2)
    filtered.clear()  # of the warm-up
    ways = [evolve(GREEDY, top_k=5, top_p=0.5, min_p=0.1), SamplingParams(top_k=VOCAB)]
    request = Request(id="", prompt=(3, 4), max_tokens=9)
    run.serve(
        [evolve(request, id=str(i), sampling=sampling) for i, sampling in enumerate(ways)]
    )
    assert filtered
    assert not any(filtered)
