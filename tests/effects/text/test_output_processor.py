"""One request on its way back: what is told, when, and what can be taken then."""

import threading
from typing import Any

import pytest

from minfer.effects.setup.folders import bundled_folder
from minfer.effects.text.output_processor import OutputProcessor
from minfer.effects.text.outputs import Logprob, RequestOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.records.messages import Finish, Finished
from minfer.records.request import Request, SamplingParams
from minfer.records.token_logprobs import TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_folder())


def assembly(
    reported: list[OutputProcessor],
    tokenizer: Tokenizer | None = None,
    *,
    streaming: bool = True,
    output: tuple[int, ...] = (),
    **settings: Any,
) -> OutputProcessor:
    sampling = SamplingParams(**settings)
    request = Request(
        id="a",
        prompt=(1, 2),
        max_tokens=99,
        n=sampling.n,
        sampling=sampling,
        output=output,
        stop_ids=frozenset(sampling.stop_token_ids),
    )
    return OutputProcessor(request, reported.append, "ab", tokenizer, streaming)


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text, character by character."""
    return [token for char in text for token in tokenizer.encode(char)]


def end(length: int, reason: str = "length", sample: int = 0, **details: Any) -> Finished:
    return Finished("a", sample, reason, length, **details)


def test_what_was_not_flushed_is_not_taken() -> None:
    """The engine's thread may be anywhere between two tokens when a reader comes."""
    heard: list[OutputProcessor] = []
    request = Request(
        id="a", prompt=(1,), max_tokens=9, sampling=SamplingParams(logprobs=0)
    )
    job = OutputProcessor(request, heard.append, streaming=True)
    job.feed(0, (5, 6), 1.0, [TokenLogprobs(5, -0.5, 1), TokenLogprobs(6, -0.25, 2)])
    job.flush()
    job.feed(0, (7,), 2.0, [TokenLogprobs(7, -4.0, 3)])
    job.finish(Finished("a", 0, "length", 3))
    output = job.take()
    assert output.outputs[0].token_ids == [5, 6]
    assert output.outputs[0].cumulative_logprob == -0.75
    assert not output.finished
    assert output.outputs[0].finish_reason is None
    job.flush()
    output = job.take()
    assert output.outputs[0].token_ids == [7]
    assert output.outputs[0].logprobs == [{7: Logprob(-4.0, 3)}]
    assert output.outputs[0].cumulative_logprob == -4.75
    assert output.finished
    assert output.outputs[0].finish_reason == "length"
    assert heard == [job, job]


def test_the_sink_is_called_once_until_it_takes() -> None:
    reported: list[OutputProcessor] = []
    job = assembly(reported)
    for token in (1, 2, 3):
        job.feed(0, (token,), 1.0)
        job.flush()
    assert reported == [job]
    assert job.take().outputs[0].token_ids == [1, 2, 3]
    job.flush()
    assert reported == [job]  # nothing came since
    job.feed(0, (4,), 2.0)
    job.flush()
    assert reported == [job, job]


def test_without_streaming_the_sink_is_called_at_the_end_of_all_samples() -> None:
    reported: list[OutputProcessor] = []
    job = assembly(reported, streaming=False, n=2)
    assert not job.eager
    ended: list[str] = []
    job.feed(0, (1, 2), 1.0)
    job.feed(1, (3,), 1.0)
    job.finish(end(2))
    job.flush(ended.append)
    assert not reported
    assert not ended
    job.finish(end(1, sample=1))
    job.flush(ended.append)
    assert ended == ["a"]
    assert reported == [job]
    output = job.take()
    assert [sample.token_ids for sample in output.outputs] == [[1, 2], [3]]
    assert output.finished
    assert output.metrics.output_tokens == 3


def test_the_end_is_known_to_others_before_the_sink_hears() -> None:
    order: list[str] = []
    job = assembly([])
    job.sink = lambda _: order.append("sink")
    job.finish(end(0))
    job.flush(lambda name: order.append(f"ended {name}"))
    assert order == ["ended a", "sink"]


def test_what_goes_beyond_the_end_does_not_count() -> None:
    job = assembly([])
    job.feed(0, (1, 2), 1.0)
    job.flush()
    job.feed(0, (3, 4, 5), 1.0)
    job.finish(end(3, "stop"))
    job.feed(0, (6,), 9.0)  # nor what comes after it
    job.flush()
    output = job.take()
    assert output.outputs[0].token_ids == [1, 2, 3]
    assert output.metrics.last_token_time == 1.0


def test_a_stop_string_is_found_where_it_is_complete(tokenizer: Tokenizer) -> None:
    reported: list[OutputProcessor] = []
    job = assembly(reported, tokenizer, streaming=False, stop="xyz")
    assert job.eager
    tokens = spelled(tokenizer, "abxyxyzcd")
    for count, token in enumerate(tokens[:6]):
        job.feed(0, (token,), float(count))
        assert job.flush() == ()
    job.feed(0, (*tokens[6:],), 6.0)
    assert job.flush() == (Finish("a", 0, 7),)
    assert job.flush() == ()  # it is said once
    job.feed(0, (5, 5), 7.0)  # the engine did not know it yet
    job.finish(end(7, "stop"))
    assert job.flush() == ()
    sample = job.take().outputs[0]
    assert (sample.text, sample.token_ids) == ("abxy", list(tokens[:7]))
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "xyz")
    assert reported == [job]


def test_a_stop_string_in_the_last_tokens_is_found_too(tokenizer: Tokenizer) -> None:
    job = assembly([], tokenizer, stop="b")
    job.feed(0, (*spelled(tokenizer, "ab"),), 1.0)
    job.finish(end(2))
    assert job.flush() == ()  # it has ended already
    sample = job.take().outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("a", "stop", "b")


def rest(job: OutputProcessor, tokens: tuple[int, ...], length: int) -> RequestOutput:
    """What is to be taken once these tokens came, and the end."""
    for token in tokens:
        job.feed(0, (token,), 1.0)
        job.flush()
    job.finish(end(length))
    job.flush()
    return job.take()


@pytest.mark.parametrize("cut", range(1, 9))
@pytest.mark.parametrize("stop", [(), ("yz",), ("xyyz",), ("never",)])
def test_a_request_that_goes_on_gives_what_comes_then(
    tokenizer: Tokenizer, cut: int, stop: tuple[str, ...]
) -> None:
    """Characters and stop strings may begin in what it had."""
    tokens = (*spelled(tokenizer, "a🙂xyyzé"),)
    assert len(tokens) >= 10
    stop_length = len(spelled(tokenizer, "a🙂xyyz")) if "yz" in "".join(stop) else 99
    assert cut < stop_length
    uncut = assembly([], tokenizer, stop=stop)
    for token in tokens[:cut]:
        uncut.feed(0, (token,), 1.0)
        uncut.flush()
    had = uncut.take().outputs
    expected = rest(uncut, tokens[cut:], len(tokens)).outputs[0]
    goes_on = assembly([], tokenizer, output=tokens[:cut], stop=stop)
    output = rest(goes_on, tokens[cut:], len(tokens))
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason) == (expected.text, expected.finish_reason)
    assert (
        sample.stop_reason
        == expected.stop_reason
        == (stop[0] if stop_length < 99 else None)
    )
    assert output.metrics.output_tokens == len(sample.token_ids)
    sent = [token for earlier in had for token in earlier.token_ids]
    assert [*sent, *expected.token_ids] == [*tokens[:cut], *sample.token_ids]


def test_a_find_after_history_counts_all_output(tokenizer: Tokenizer) -> None:
    tokens = spelled(tokenizer, "abcd")
    job = assembly([], tokenizer, output=(*tokens[:2],), stop="d")
    job.feed(0, (tokens[2],), 1.0)
    job.flush()
    job.feed(0, (tokens[3],), 1.0)
    assert job.flush() == (Finish("a", 0, 4),)


def test_rejections_and_failures_are_errors() -> None:
    for reason in ("rejected", "error"):
        job = assembly([], n=2)
        for sample in (0, 1):
            job.finish(end(0, reason, sample, error="why"))
        job.flush()
        output = job.take()
        assert {sample.finish_reason for sample in output.outputs} == {"error"}
        assert {sample.error for sample in output.outputs} == {"why"}
        assert job.rejected == ("why" if reason == "rejected" else "")


def test_what_the_cache_gave_is_that_of_the_first_sample() -> None:
    job = assembly([], n=2)
    assert job.take().num_cached_tokens == 0
    job.finish(end(0, sample=0, cached=2))
    job.finish(end(0, sample=1, cached=1))
    assert job.take().num_cached_tokens == 2


def test_a_failure_is_reported_once_and_raised() -> None:
    reported: list[OutputProcessor] = []
    job = assembly(reported)
    job.fail(RuntimeError("the engine broke"))
    job.fail(RuntimeError("again"))
    assert reported == [job]
    with pytest.raises(RuntimeError, match="again"):
        job.take()


def test_one_thread_may_take_while_another_feeds(tokenizer: Tokenizer) -> None:
    ready = threading.Semaphore(0)
    job = assembly([], tokenizer)
    job.sink = lambda _: ready.release()
    tokens = spelled(tokenizer, "abcdefgh" * 300)
    outputs: list[RequestOutput] = []

    def read() -> None:
        while not outputs or not outputs[-1].finished:
            assert ready.acquire(timeout=60)
            outputs.append(job.take())

    reader = threading.Thread(target=read)
    reader.start()
    for token in tokens:
        job.feed(0, (token,), 1.0)
        job.flush()
    job.finish(end(len(tokens)))
    job.flush()
    reader.join()
    samples = [sample for output in outputs for sample in output.outputs]
    assert "".join(sample.text for sample in samples) == "abcdefgh" * 300
    assert [token for sample in samples for token in sample.token_ids] == tokens
