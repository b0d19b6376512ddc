"""Requests that have their logits changed get the same tokens alone and among neighbours,
with and without preemption, however far steps run ahead.
"""

import random

import pytest
from attrs import evolve

from minfer.records.messages import Preempted
from minfer.records.request import Request
from tests.circles import claimed
from tests.effects.execution.tiny_engine import VOCAB, Model, Run, Tokens, requests

pytestmark = pytest.mark.usefixtures("device_kind")


def asking() -> list[Request]:
    """Requests most of which ask for something, in many combinations."""
    rng = random.Random(5)
    made_requests = []
    for i, request in enumerate(requests(0, 14)):
        ids = rng.sample(range(VOCAB), 60)
        words = ((ids[0],), (ids[1], ids[2]), (ids[3], ids[3], ids[4]))
        sampling = evolve(
            request.sampling,
            repetition_penalty=rng.choice([1.0, 1.4]),
            frequency_penalty=rng.choice([0.0, 0.6, -0.8]),
            presence_penalty=rng.choice([0.0, 0.9]),
            typical_p=rng.choice([1.0, 0.8]),
            logit_bias=((ids[5], 3.0), (ids[6], -100.0)) if i % 3 == 0 else (),
            allowed_token_ids=tuple(ids[5:]) if i % 5 == 0 else None,
            max_tokens=None,
            min_tokens=12 if i % 4 == 0 else 0,
        )
        shaped = evolve(request, sampling=sampling, bad_words=words if i % 2 else ())
        made_requests.append(request if i % 7 == 6 else shaped)
    return made_requests


@pytest.fixture(scope="module")
def solo(model: Model) -> Tokens:
    """By transformers' forward and the definition."""
    return {(request.id, 0): model.expected(request) for request in asking()}


@pytest.mark.long
def test_what_is_requested_matters(solo: Tokens, model: Model) -> None:
    plain = {(request.id, 0): model.expected(request) for request in requests(0, 14)}
    assert sum(solo[name] != plain[name] for name in solo) >= 10


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, *claimed([3])])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 5}, {"num_blocks": 12}],
    ids=str,
)
def test_tokens_are_those_of_a_request_served_solo(
    model: Model, solo: Tokens, settings: dict[str, int], depth: int
) -> None:
    run = Run.start(model, **settings, depth=depth)
    assert run.serve(asking(), arrival_gap=depth % 2) == solo
    if "num_blocks" in settings:
        assert run.count(Preempted)


@pytest.mark.long
def test_shaped_tokens_are_the_same_without_steps_ahead(
    model: Model, solo: Tokens
) -> None:
    bound = [
        evolve(request, needs_host_mask=i % 2 == 0) for i, request in enumerate(asking())
    ]
    assert Run.start(model, num_blocks=20).serve(bound, arrival_gap=1) == solo


@pytest.mark.long
def test_a_request_that_is_resumed_goes_on_as_it_was(model: Model, solo: Tokens) -> None:
    for request in asking():
        tokens = solo[request.id, 0]
        if len(tokens) > 4:
            resumed = Run.start(model).serve([evolve(request, output=tuple(tokens[:3]))])
            assert resumed[request.id, 0] == tokens[3:]
