"""What one request may be, and how much of bodies is held at once."""

import gzip
import json
import re
from typing import Any

import pytest
from attrs import evolve
from websockets.sync.client import connect

from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.live.errors import OverloadedError
from minfer.effects.live.input_processing.input_processor import SchedulingHints
from minfer.effects.live.input_processing.prompts import TokenizedPrompt
from minfer.effects.serving.client_errors import ApiError, ContextLengthError
from minfer.effects.serving.protocol import GenerationRequest, Include
from minfer.effects.serving.request_parsing.limits import (
    MIN_BODY_LIMIT_BYTES,
    UNCOUNTED_BODY_BYTES,
    BodyMemory,
    Limits,
    largest_body,
)
from minfer.records.request import SamplingParams
from tests.effects.served import Serving
from tests.effects.serving.raw_requests import HEAD, exchange, raw

LIMITS = Limits(
    body=MIN_BODY_LIMIT_BYTES, context=2048, text=40_000, max_running=16, max_waiting=64
)


def request(n: int, prompts: int) -> GenerationRequest:
    return GenerationRequest(
        prompts=(TokenizedPrompt(None, [5]),) * prompts,
        params=SamplingParams(n=n),
        urgency=SchedulingHints(),
        stream=False,
        include=Include(),
    )


@pytest.mark.long
def test_the_largest_body_holds_a_context_of_ids() -> None:
    assert largest_body(2048) == MIN_BODY_LIMIT_BYTES
    longest = 1_000_000
    assert len(json.dumps([151_000] * longest)) <= largest_body(longest)


def test_more_samples_than_an_idle_server_could_take() -> None:
    LIMITS.check_samples(request(64, 1))
    LIMITS.check_samples(request(1, 80))
    with pytest.raises(ApiError, match="waiting queue, which holds 64") as caught:
        LIMITS.check_samples(request(65, 1))
    assert (caught.value.status, caught.value.param) == (400, "n")
    with pytest.raises(ApiError, match="81 prompts of 1 samples each"):
        LIMITS.check_samples(request(1, 81))


def test_beams_need_places_as_samples_do() -> None:
    beams = BeamSearchParams(beam_width=8, n=2)
    search = evolve(request(2, 1), params=beams.sampling, beams=beams)
    LIMITS.check_samples(search)
    with pytest.raises(ApiError, match="best_of: 8 samples") as caught:
        evolve(LIMITS, max_waiting=7).check_samples(search)
    assert caught.value.param == "best_of"


def request_of(
    *lengths: int, max_tokens: int | None, field: str = "max_tokens"
) -> GenerationRequest:
    """A request with prompts of these lengths, for `max_tokens` tokens of output."""
    return evolve(
        request(1, 1),
        prompts=tuple(TokenizedPrompt(None, [5] * length) for length in lengths),
        params=SamplingParams(max_tokens=max_tokens),
        max_tokens_field=field,
    )


def test_more_output_than_fits_is_refused_by_its_field() -> None:
    LIMITS.check_length(request_of(2000, max_tokens=48), "prompt")
    LIMITS.check_length(request_of(2000, max_tokens=None), "prompt")
    # A default, which is cut.
    LIMITS.check_length(request_of(2000, max_tokens=49, field=""), "prompt")
    LIMITS.check_length(
        request_of(2048, max_tokens=1), "prompt"
    )  # too long whatever is wanted
    with pytest.raises(ContextLengthError) as caught:
        LIMITS.check_length(
            request_of(2000, max_tokens=49, field="max_output_tokens"), "input"
        )
    assert str(caught.value) == (
        "This model's maximum context length is 2048 tokens. However, you requested 2049 "
        "tokens (2000 in the input, 49 in the completion). Shorten the input, or lower "
        "max_output_tokens to 48"
    )
    assert (caught.value.status, caught.value.param) == (400, "max_output_tokens")
    with pytest.raises(ContextLengthError, match=r"\(2000 in the prompt\[1\], 49 in"):
        LIMITS.check_length(request_of(5, 2000, max_tokens=49), "prompt")


CHAT = {"messages": [{"role": "user", "content": "x"}]}
WANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "max_tokens": ("completions", {"prompt": "x"}),
    "max_completion_tokens": ("chat/completions", CHAT),
    "max_output_tokens": ("responses", {"input": "x"}),
}


@pytest.mark.long
@pytest.mark.parametrize(("field", "target"), WANTED.items())
def test_each_endpoint_refuses_it_by_its_own_field(
    bundled: Serving, field: str, target: tuple[str, dict[str, Any]]
) -> None:
    path, body = target
    for stream in (False, True):
        response = bundled.post(path, **body, **{field: 2048}, stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == field
        assert "maximum context length is 2048 tokens. However" in error["message"]
    # Told so, one may go on: what it says fits.
    fits = int(error["message"].rpartition(" ")[2])
    stop = {} if path == "responses" else {"stop": ["\n", " ", "e"]}
    assert bundled.post(path, **body, **{field: fits}, **stop).status_code == 200


def test_errors_of_a_prompt_come_first(bundled: Serving) -> None:
    for prompt, code in (("", None), ("a " * 3000, "context_length_exceeded")):
        error = bundled.post("completions", prompt=prompt, max_tokens=9999).json()[
            "error"
        ]
        assert (error["param"], error["code"]) == ("prompt", code)
    wrong = bundled.post("completions", prompt="x", max_tokens=9999, temperature=-1)
    assert wrong.json()["error"]["param"] == "temperature"


@pytest.mark.long
def test_without_max_tokens_a_request_gets_what_fits(bundled: Serving) -> None:
    prompt = [5] * 2045
    response = bundled.post("completions", prompt=prompt, ignore_eos=True).json()
    assert response["usage"]["completion_tokens"] == 3  # not the 16 of the default
    assert response["choices"][0]["finish_reason"] == "length"


def test_anthropics_clients_get_its_message(
    bundled: Serving,
) -> None:
    response = bundled.post("messages", **CHAT, max_tokens=2048)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert re.match(
        r"input length and `max_tokens` exceed context limit: \d+ \+ 2048 > 2048, ",
        error["message"],
    )


def test_a_prompt_that_is_too_long_is_one_error_however_it_comes(
    bundled: Serving,
) -> None:
    data = json.dumps({"prompt": [5] * 200_000, "max_tokens": 1}).encode()
    answers = []
    for size in (len(data), 100_000, 1000):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        answers.append(exchange(bundled, head + chunks + b"0\r\n\r\n"))
    answers.append(raw(bundled, data))
    answers.append(raw(bundled, data.replace(b" ", b"")))
    packed = gzip.compress(data)
    answers.append(raw(bundled, packed, headers="Content-Encoding: gzip\r\n"))
    with connect(f"ws://127.0.0.1:{bundled.port}/v1/stream") as link:
        body = data.decode()
        link.send(f'{{"id": "a", "endpoint": "completions", "body": {body}}}')
        reply = json.loads(link.recv())
        answers.append((reply["status"], {"error": reply["error"]}))
    assert all(answer == answers[0] for answer in answers)
    status, reply = answers[0]
    error = reply["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == "prompt"
    assert "maximum context length is 2048 tokens" in error["message"]


def test_too_long_prompts_have_equal_errors_in_thread_and_worker(
    bundled: Serving,
) -> None:
    for length in (2048, 3000, 9000):
        short, long = [
            bundled.post("completions", prompt=[5] * length, **fields).json()
            for fields in ({}, {"user": "u" * 200})
        ]
        assert short == long
        assert short["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 2048 tokens" in short["error"]["message"]


def test_one_request_never_has_all_seats() -> None:
    assert LIMITS.max_running_prompts(1) == 14
    assert LIMITS.max_running_prompts(4) == 3
    assert LIMITS.max_running_prompts(128) == 1
    assert evolve(LIMITS, max_waiting=5).max_running_prompts(1) == 5
    assert evolve(LIMITS, max_running=1).max_running_prompts(1) == 1


def test_bodies_are_counted_by_client() -> None:
    holding = BodyMemory(max_bytes=4 * UNCOUNTED_BODY_BYTES)
    size = 2 * UNCOUNTED_BODY_BYTES
    with holding.reserve("a", size):
        with pytest.raises(OverloadedError), holding.reserve("a", size):
            pass  # that would be more than its share
        with holding.reserve("a", UNCOUNTED_BODY_BYTES):
            pass  # small ones are always taken
        with holding.reserve("b", size):
            assert holding.reserved == {"a": size, "b": size}
            with (
                pytest.raises(OverloadedError),
                holding.reserve("c", UNCOUNTED_BODY_BYTES + 1),
            ):
                pass
    assert holding.reserved == {}
