"""Where each request's time went, as the library and the server tell it: sums
are exact.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from prometheus_client import generate_latest

from minfer import LLM, SamplingParams
from minfer.effects.serving.observability.metrics import Metrics
from minfer.effects.text.outputs import RequestOutput
from minfer.records.messages import Admitted, Preempted
from tests.effects.served import Serving, Slow, events, serving
from tests.effects.serving.raw_requests import asking
from tests.effects.serving.test_metrics import read
from tests.effects.watched import Watched, settle

CAUSES = {"step", "rows", "blocks", "budget", "sibling", "policy", "share", "fault"}


def oracle(folder: str, **settings: Any) -> LLM:
    return LLM(folder, executor="oracle", block_size=8, **settings)


def check(output: RequestOutput) -> None:
    reported = output.metrics
    assert reported.first_scheduled_time is not None
    waited = reported.first_scheduled_time - reported.arrival_time
    assert sum(reported.queue_times.values()) == pytest.approx(waited, abs=1e-9)
    assert set(reported.queue_times) <= CAUSES
    assert all(seconds > 0 for seconds in reported.queue_times.values())
    assert reported.ttft is not None
    assert reported.ttft >= waited >= 0


def test_a_wait_for_rows_is_reported(folder: str) -> None:
    with oracle(folder, num_gpu_blocks_override=64, max_num_seqs=2) as llm:
        llm.worker.driver.deferred.executor = Slow(llm.worker.driver.executor, 0.003)
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        outputs = llm.generate([[i] * 5 for i in range(1, 6)], params)
        settle(llm)
    for output in outputs:
        check(output)
        assert output.metrics.preemptions == 0
    for output in outputs[:2]:
        assert set(output.metrics.queue_times) <= {"step"}
    waits = [output.metrics.queue_times.get("rows", 0.0) for output in outputs[2:]]
    assert waits[0] >= 0.02  # the steps of those before it
    assert waits[2] >= 2 * 0.02
    assert waits == sorted(waits)


def test_preemptions_and_waits_agree_with_the_reasons(folder: str) -> None:
    with oracle(
        folder,
        num_gpu_blocks_override=12,
        max_num_seqs=6,
        max_model_len=64,
        max_num_batched_tokens=24,
    ) as llm:
        metrics = Metrics(llm, "tiny")
        turns = Watched(llm)
        params = [
            SamplingParams(max_tokens=3 + 5 * i, temperature=0, ignore_eos=True)
            for i in range(9)
        ]
        outputs = llm.generate([[i + 1] * (3 + 2 * i) for i in range(9)], params)
        samples = llm.generate(
            [7] * 9, SamplingParams(max_tokens=9, n=3, ignore_eos=True)
        )
        settle(llm)
        text = generate_latest(metrics.registry).decode()
        values = read(metrics)
    reasons = [reason for turn in turns for reason in turn.reasons]
    for output in (*outputs, *samples):
        check(output)
        own_reasons = [
            reason for reason in reasons if getattr(reason, "id", "") == output.request_id
        ]
        gave = sum(isinstance(reason, Preempted) for reason in own_reasons)
        assert output.metrics.preemptions == gave
        first = next(reason for reason in own_reasons if isinstance(reason, Admitted))
        waited = sum(output.metrics.queue_times.values())
        assert waited - 0.5 < first.waited <= waited + 1e-9  # it came before its turn did
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert values["num_preemptions_total"] == values["request_preemptions_sum"]
    assert values["request_preemptions_count"] == 10
    by_cause = {
        key: value for key, value in values.items() if "request_wait_seconds_total" in key
    }
    assert sum(by_cause.values()) == pytest.approx(
        values["request_queue_time_seconds_sum"]
    )
    assert values["request_wait_seconds_total blocks"] > 0
    assert 'minfer_request_wait_seconds_total{cause="blocks",model_name="tiny"}' in text


def test_who_never_ran_has_no_queue_times(folder: str) -> None:
    with oracle(folder, num_gpu_blocks_override=64, max_num_seqs=1) as llm:
        stream = llm.stream(
            [[1, 2], [3, 4]], SamplingParams(max_tokens=500, ignore_eos=True)
        )
        next(stream)
        waiting = list(llm.frontend.processors.values())[1]
        assert waiting.times.started is None
        assert waiting.take().metrics.first_scheduled_time is None
        assert not waiting.take().metrics.queue_times
        stream.close()


# --- the server -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Serving]:
    with serving(
        folder,
        executor="oracle",
        num_gpu_blocks_override=64,
        block_size=8,
        max_num_seqs=2,
        step=0.002,
    ) as server:
        yield server


FIELDS = {"queue_times", "ttft", "tpot", "latency", "preemptions", "cached_tokens"}


@pytest.mark.long
def test_timing_is_reported_if_requested(served: Serving) -> None:
    fields = {
        "prompt": [[5] * 20, [6] * 20, [7] * 20],
        "max_tokens": 6,
        "n": 2,
        "ignore_eos": True,
    }
    plain = served.post("completions", **fields).json()
    assert "timing" not in plain
    response = served.post("completions", **fields, timing=True).json()
    assert len(response["timing"]) == 3
    for timing in response["timing"]:
        assert set(timing) == FIELDS
        assert timing["latency"] >= timing["ttft"] >= sum(timing["queue_times"].values())
        assert set(timing["queue_times"]) <= CAUSES
    cached = [timing["cached_tokens"] for timing in response["timing"]]
    assert cached == [16] * 3
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(cached)
    assert response.keys() - plain.keys() == {"timing"}


def test_timing_tells_what_a_request_waited_for(served: Serving) -> None:
    before = {"prompt": [5], "n": 2, "max_tokens": 40, "ignore_eos": True}
    with asking(served, json.dumps(before).encode()):
        served.until(lambda: len(served.llm.worker.driver.state.running) == 2)
        response = served.post(
            "completions", prompt=[6], max_tokens=2, timing=True
        ).json()
    assert response["timing"][0]["queue_times"]["rows"] > 0


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_tells_at_its_end(served: Serving, usage: bool) -> None:
    body = {
        "prompt": [[5] * 9, [6] * 9],
        "max_tokens": 5,
        "stream": True,
        "timing": True,
        "stream_options": {"include_usage": usage},
    }
    with served.http.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
        chunks = list(events(answer.iter_lines()))
    *earlier, last = chunks
    assert all("timing" not in chunk for chunk in earlier)
    assert last["choices"] == []
    assert [set(timing) for timing in last["timing"]] == [FIELDS, FIELDS]
    assert ("usage" in last) == usage


@pytest.mark.long
def test_the_sdk_reads_it() -> None:
    fields: Any = {"model": "bundled", "max_tokens": 3, "extra_body": {"timing": True}}
    talk: Any = [{"role": "user", "content": "ab"}]
    with (
        serving(names=("bundled",), num_gpu_blocks_override=64) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        completion = client.completions.create(prompt="ab", **fields)
        (reported,) = (completion.model_extra or {})["timing"]
        assert reported["ttft"] > 0
        answer = client.chat.completions.create(messages=talk, **fields)
        assert len((answer.model_extra or {})["timing"]) == 1
        with client.chat.completions.create(
            messages=talk, stream=True, **fields
        ) as stream:
            *chunks, last = list(stream)
        assert all(chunk.choices for chunk in chunks)
        assert not last.choices
        assert last.model_extra["timing"][0]["latency"] > 0
