"""What could be valid passes, and what could not is counted before it is parsed."""

import json
import time
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.live.edge import Urgency
from minfer.effects.live.errors import OverloadedError
from minfer.effects.live.prompts import Asked
from minfer.effects.serving.errors import ApiError
from minfer.effects.serving.limits import (
    ITEMS,
    LEAST_BODY,
    UNCOUNTED,
    Holding,
    Limits,
    largest_body,
)
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.request import SamplingParams

LIMITS = Limits(body=LEAST_BODY, context=2048, text=40_000, seats=16, line=64)


def request(n: int, prompts: int) -> GenerationRequest:
    return GenerationRequest(
        prompts=(Asked(None, [5]),) * prompts,
        params=SamplingParams(n=n),
        urgency=Urgency(),
        stream=False,
        include=Include(),
    )


VALID: dict[str, Any] = {
    "a context of ids": {"prompt": [7] * 2047},
    "many prompts of ids": {"prompt": [[7] * 2000] * 100},
    "a text of commas": {"prompt": "," * 40_000},
    "texts of commas": {"prompt": ["," * 40_000] * 10},
    "messages": {"messages": [{"role": "user", "content": "a, b"}] * ITEMS},
}


@pytest.mark.parametrize("body", VALID.values(), ids=VALID)
def test_what_could_be_valid_is_not_refused(body: dict[str, Any]) -> None:
    LIMITS.check_body(json.dumps(body).encode())


def test_what_could_not_is_refused_in_no_time() -> None:
    data = json.dumps({"prompt": [7] * 1_000_000, "max_tokens": 1}).encode()
    begun = time.process_time()
    with pytest.raises(ApiError, match="context holds 2048 tokens"):
        LIMITS.check_body(data)
    assert time.process_time() - begun < 0.2  # 4 ms on an idle machine


def test_without_a_bound_on_texts_nothing_is_refused() -> None:
    evolve(LIMITS, text=None).check_body(json.dumps({"prompt": [7] * 10**6}).encode())


def test_the_largest_body_holds_a_context_of_ids() -> None:
    assert largest_body(2048) == LEAST_BODY
    longest = 1_000_000
    assert len(json.dumps([151_000] * longest)) <= largest_body(longest)


def test_more_samples_than_an_idle_server_could_take() -> None:
    LIMITS.check_samples(request(64, 1))
    LIMITS.check_samples(request(1, 80))
    with pytest.raises(ApiError, match="line, which holds 64") as caught:
        LIMITS.check_samples(request(65, 1))
    assert (caught.value.status, caught.value.param) == (400, "n")
    with pytest.raises(ApiError, match="81 prompts of 1 samples each"):
        LIMITS.check_samples(request(1, 81))


def test_one_request_never_has_all_seats() -> None:
    assert LIMITS.window(1) == 14
    assert LIMITS.window(4) == 3
    assert LIMITS.window(128) == 1
    assert evolve(LIMITS, line=5).window(1) == 5
    assert evolve(LIMITS, seats=1).window(1) == 1


def test_bodies_are_held_by_client() -> None:
    holding = Holding(most=4 * UNCOUNTED)
    size = 2 * UNCOUNTED
    with holding.hold("a", size):
        with pytest.raises(OverloadedError), holding.hold("a", size):
            pass  # that would be more than its share
        with holding.hold("a", UNCOUNTED):
            pass  # small ones are always taken
        with holding.hold("b", size):
            assert holding.held == {"a": size, "b": size}
            with pytest.raises(OverloadedError), holding.hold("c", UNCOUNTED + 1):
                pass
    assert holding.held == {}
