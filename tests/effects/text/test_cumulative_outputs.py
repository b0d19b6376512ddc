"""Outputs that hold all of a request so far."""

import copy
import pickle
import time
from itertools import accumulate
from operator import add

from attrs import evolve

from minfer.effects.text.cumulative_outputs import CumulativeRequest
from minfer.effects.text.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)

METRICS = RequestMetrics(arrival_time=0.0)
EMPTY = RequestOutput(
    request_id="a",
    prompt="x",
    prompt_ids=(1,),
    outputs=[],
    finished=False,
    metrics=METRICS,
)


def delta(index: int, text: str, *tokens: int, end: str | None = None) -> RequestOutput:
    logprobs = [{token: Logprob(-1.0, 1)} for token in tokens]
    sample = CompletionOutput(
        index=index,
        text=text,
        token_ids=list(tokens),
        logprobs=logprobs,
        finish_reason=end,
    )
    return evolve(EMPTY, outputs=[sample], finished=end is not None)


def test_each_output_holds_all_that_came_until_then() -> None:
    texts, tokens = ["ab", "", "c", "de"], [[1, 2], [3], [4], [5, 6]]
    request = CumulativeRequest()
    outputs = [
        request.add(delta(0, text, *ids)) for text, ids in zip(texts, tokens, strict=True)
    ]
    samples = [output.outputs[0] for output in outputs]
    expected_texts, expected_ids = list(accumulate(texts)), list(accumulate(tokens, add))
    for order in (range(4), range(3, -1, -1)):  # an earlier one may be read later
        assert [samples[i].text for i in order] == [expected_texts[i] for i in order]
        assert [samples[i].token_ids for i in order] == [expected_ids[i] for i in order]
        for i in order:
            logprobs = samples[i].logprobs or []
            assert [min(entry) for entry in logprobs] == expected_ids[i]


def test_all_samples_are_in_each_output_in_their_order() -> None:
    request = CumulativeRequest()
    request.add(delta(1, "b", 7))
    request.add(delta(0, "a", 5, end="stop"))
    last = request.add(delta(1, "c", 8, end="length"))
    assert [sample.text for sample in last.outputs] == ["a", "bc"]
    assert [sample.finish_reason for sample in last.outputs] == ["stop", "length"]
    assert last.finished


def test_lists_are_an_outputs_own() -> None:
    request = CumulativeRequest()
    first = request.add(delta(0, "a", 5))
    first.outputs[0].token_ids.append(99)
    first.prompt_token_ids.append(99)
    second = request.add(delta(0, "b", 6))
    assert first.outputs[0].token_ids == [5, 99]
    assert second.outputs[0].token_ids == [5, 6]
    assert second.prompt_token_ids == [1]


def test_copies_are_plain_outputs() -> None:
    request = CumulativeRequest()
    sample = request.add(delta(0, "a", 5)).outputs[0]
    for made in (copy.copy(sample), pickle.loads(pickle.dumps(sample))):  # noqa: S301 - made here
        assert type(made) is CompletionOutput
        assert (made.text, made.token_ids, made.index) == ("a", [5], 0)


def test_the_cost_of_an_output_does_not_grow() -> None:
    def seconds(count: int) -> float:
        request = CumulativeRequest()
        start = time.thread_time()
        for i in range(count):
            last = request.add(delta(0, "x", i))
        assert len(last.outputs[0].token_ids) == count
        return time.thread_time() - start

    seconds(500)
    assert min(seconds(4000) for _ in range(3)) < 16 * min(seconds(500) for _ in range(5))
