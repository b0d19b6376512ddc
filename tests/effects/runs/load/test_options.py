"""Options: what they are without being told, and which values make no sense."""

import argparse
import math

import pytest

from minfer.effects.runs.load.options import add_options, base_url
from minfer.effects.runs.load.record import LoadError


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(words)


def test_defaults() -> None:
    told = options()
    assert base_url(told) == "http://127.0.0.1:8000"
    assert (told.endpoint, told.stream, told.warmup, told.repeat) == (
        "completions",
        True,
        1,
        1,
    )
    assert (told.request_rate, told.burstiness) == (math.inf, 1)
    assert (told.num_prompts, told.max_concurrency) == (None, None)


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (("--port", "9000"), "http://127.0.0.1:9000"),
        (("--host", "gpu.local"), "http://gpu.local:8000"),
        (("--host", "::1", "--port", "80"), "http://[::1]:80"),
        (("--base-url", "https://x/y/v1"), "https://x/y/v1"),
    ],
)
def test_where_the_server_is(words: tuple[str, ...], url: str) -> None:
    assert base_url(options(*words)) == url


def test_where_the_server_is_is_said_once() -> None:
    told = options("--base-url", "http://x", "--host", "y", "--port", "9")
    with pytest.raises(LoadError, match=r"--base-url .* leave --host and --port out"):
        base_url(told)
    with pytest.raises(LoadError, match="leave --port out"):
        base_url(options("--base-url", "http://x", "--port", "9"))


def test_values_are_read() -> None:
    told = options(
        *("--request-rate", "2.5", "--burstiness", "inf", "--no-stream"),
        *("--extra-body", '{"top_p": 0.5}', "--temperature", "0"),
        *("--goodput", "ttft:1", "tpot:2"),
    )
    assert (told.request_rate, told.burstiness, told.stream) == (2.5, math.inf, False)
    assert told.extra_body == {"top_p": 0.5}
    assert told.goodput == ["ttft:1", "tpot:2"]


@pytest.mark.parametrize(
    "words",
    [
        ("--num-prompts", "0"),
        ("--num-prompts", "1e3"),
        ("--max-concurrency", "-1"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--duration", "inf"),
        ("--random-range-ratio", "1"),
        ("--temperature", "-0.1"),
        ("--vocab-size", "2"),
        ("--timeout", "0"),
        ("--port", "65536"),
        ("--extra-body", "[1]"),
        ("--extra-body", "{"),
        ("--endpoint", "embeddings"),
    ],
)
def test_values_that_make_no_sense_are_named(words: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        options(*words)
