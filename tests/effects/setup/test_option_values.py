"""Values of settings, as words and otherwise."""

import argparse

import pytest

from minfer.effects.setup.engine_args import EngineArgs
from minfer.effects.setup.option_values import (
    ITL,
    LENGTH,
    read_bytes,
    read_itl_target,
    read_json_object,
    read_length,
    read_seconds,
    resolve_policy,
    whole_number,
)
from minfer.policies.builtin import Priority
from minfer.records.policy import FirstCome
from minfer.values.checks import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5", 5),
        ("2k", 2000),
        ("2K", 2048),
        ("1.5G", 3 * 2**29),
        ("1GiB", 2**30),
        ("3m", 3 * 10**6),
    ],
)
def test_sizes_are_read_as_vllm_reads_them(text: str, size: int) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "1.5.2", "1.5", "12Q", "-1"])
def test_what_is_no_size_is_reported(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size; write 512M"):
        read_bytes(text)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5K", 1536),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("auto", -1),
        ("-1", -1),
    ],
)
def test_lengths_are_read_as_vllm_reads_them(text: str, length: int) -> None:
    assert read_length(text) == length
    assert LENGTH.is_valid(length)


@pytest.mark.parametrize(
    "text", ["", "k", "4KB", "4KiB", "4.5.1k", "4.5", "all", "-2", "-1k"]
)
def test_what_is_no_length_is_reported(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write 4096, 4k .*or auto"):
        read_length(text)
    assert [LENGTH.is_valid(value) for value in (None, 2)] == [True] * 2
    assert [LENGTH.is_valid(value) for value in (1, 0, -2, True, "4k")] == [False] * 5


def test_whole_numbers_are_neither_flags_nor_too_large() -> None:
    is_valid = whole_number(2).is_valid
    assert [is_valid(value) for value in (None, 2, 2**63 - 1)] == [True] * 3
    assert [is_valid(value) for value in (1, True, 2.0, "3", 2**63)] == [False] * 5


def test_a_policy_is_a_name_or_has_all_that_the_protocol_asks_for() -> None:
    assert resolve_policy("priority") == Priority()
    policy = FirstCome()
    assert resolve_policy(policy) is policy
    with pytest.raises(ConfigError, match="is a class: make one of it"):
        resolve_policy(FirstCome)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigError, match="lacks "):
        resolve_policy(object())  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"num_speculative_tokens": 1' + "0" * 5000 + "}", "not JSON"),
        ("[1]", "not a JSON object"),
    ],
)
def test_what_is_no_json_object_is_reported(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        read_json_object(text)
    assert read_json_object('{"method": "ngram"}') == {"method": "ngram"}


def test_seconds_are_finite() -> None:
    assert read_seconds("0") == 0
    assert read_seconds("2.5") == 2.5
    for text in ("nan", "inf", "-1", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="number of seconds"):
            read_seconds(text)


@pytest.mark.parametrize(("text", "value"), [("12.5", 12.5), ("auto", "auto"), ("7", 7)])
def test_a_target_for_the_time_between_tokens(text: str, value: float | str) -> None:
    assert read_itl_target(text) == value
    assert ITL.is_valid(value)


@pytest.mark.parametrize("text", ["0", "-3", "inf", "1e300", "nan", "fast", ""])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="itl_target must be a number of milliseconds"):
        EngineArgs(itl_target=read_itl_target(text))
