"""Options: their defaults, values that make no sense, and options that were removed."""

import argparse
import math

import pytest

from minfer.effects.runs.load.load_options import REMOVED, add_options


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser)
    return parser.parse_args(words)


def test_defaults() -> None:
    given = options()
    assert (given.base_url, given.backend) == ("http://127.0.0.1:8000", "openai")
    assert (given.request_rate, given.burstiness) == (math.inf, 1)
    assert (given.num_prompts, given.max_concurrency) == (None, None)
    assert given.metric_percentiles == (99,)


def test_values_are_read() -> None:
    given = options(
        *("--request-rate", "2.5", "--burstiness", "inf", "--temperature", "0"),
        *("--goodput", "ttft:1", "tpot:2.5", "--metric-percentiles", "50,99.9"),
        *("--endpoint-type", "openai-chat", "--endpoint", "/chat"),
    )
    assert (given.request_rate, given.burstiness) == (2.5, math.inf)
    assert given.goodput == [("ttft", 1), ("tpot", 2.5)]
    assert given.metric_percentiles == (50, 99.9)
    assert (given.backend, given.endpoint) == ("openai-chat", "/chat")


@pytest.mark.parametrize(
    "words",
    [
        ("--num-prompts", "0"),
        ("--num-prompts", "1e3"),
        ("--max-concurrency", "-1"),
        ("--request-rate", "0"),
        ("--request-rate", "nan"),
        ("--random-range-ratio", "1"),
        ("--temperature", "-0.1"),
        ("--endpoint", "chat"),
        ("--dataset-name", "sharegpt"),
        ("--metric-percentiles", "50,101"),
        ("--goodput", "ttft"),
        ("--goodput", "itl:5"),
        ("--goodput", "ttft:nan"),
        ("--goodput", "ttft:-1"),
    ],
)
def test_values_that_make_no_sense_are_named(words: tuple[str, str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        options(*words)


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("values", [(), ("1",)])
def test_removed_options_say_what_replaces_them(
    name: str, values: tuple[str, ...]
) -> None:
    with pytest.raises(argparse.ArgumentError) as caught:
        options(name, *values)
    assert str(caught.value) == f"argument {name}: was removed: {REMOVED[name]}"
