"""What an answer cost is told at its end, and where its time went to who asks."""

import pytest
from attrs import evolve

from minfer.effects.serving.openai.usage import timing_of, usage_of
from tests.effects.serving.openai.helpers import (
    chat,
    completion,
    read,
    refused,
    served,
    writer_of,
)


def test_tokens_of_all_prompts_count_together() -> None:
    assert usage_of([*served(3, 2, 1), *served(10, 20, 4)]) == {
        "prompt_tokens": 13,
        "completion_tokens": 22,
        "total_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 5},
    }


def test_what_did_not_come_to_be_is_null() -> None:
    (prompt_usage,) = served(3, 0, 1)
    timing = timing_of(prompt_usage)
    assert (timing["ttft"], timing["tpot"], timing["latency"]) == (None, None, None)
    times = evolve(
        prompt_usage.metrics, output_tokens=3, first_token_time=1.0, last_token_time=2.0
    )
    timing = timing_of(evolve(prompt_usage, metrics=times))
    assert (timing["ttft"], timing["tpot"], timing["latency"]) == (1.0, 0.5, 2.0)
    assert (timing["preemptions"], timing["cached_tokens"]) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_timing_is_sent_only_if_requested(stream: bool) -> None:
    error = refused(type(completion()), b'{"prompt": "x", "timing": "yes"}')
    assert error.param == "timing"
    assert "true or false" in str(error)
    for body in (chat(stream=stream), completion(stream=stream)):
        events = read(writer_of(body).end(served(1, 1, 0)))
        assert not any("timing" in event for event in events)
    for body in (
        chat(stream=stream, timing=True),
        completion(stream=stream, timing=True),
    ):
        first = read(writer_of(body).end([*served(1, 1, 0), *served(1, 1, 7)]))[0]
        assert [timing["cached_tokens"] for timing in first["timing"]] == [0, 7]
