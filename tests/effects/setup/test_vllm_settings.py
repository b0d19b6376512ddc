"""Settings that users of vLLM pass to LLM."""

import logging
import math
from typing import Any

import pytest
import torch

from minfer import LLM, AsyncEngineArgs, ConfigError
from minfer.effects.setup.vllm_settings import as_word
from tests.effects.setup.vllm_usage import KEYWORD_SETS

MUST_WORK = 40  # of the keyword sets
OF_LLM = [(words, outcome) for name, words, outcome in KEYWORD_SETS if name == "LLM"]


def test_most_keyword_sets_work() -> None:
    assert len(KEYWORD_SETS) == 47
    works = [outcome for *_, outcome in KEYWORD_SETS if outcome != "refused"]
    assert len(works) >= MUST_WORK


@pytest.mark.parametrize(("settings", "outcome"), OF_LLM)
def test_settings_are_taken_or_refused_with_a_remedy(
    settings: dict[str, Any], outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "minfer.settings")
    if outcome == "refused":
        for make in (LLM, AsyncEngineArgs):
            with pytest.raises(ConfigError, match=f"{min(settings)}.*: .*; "):
                make(**settings)
        return
    with LLM(executor="dry", **settings) as llm:
        assert llm.generate("a")
    assert ("has no effect: " in caplog.text) <= (outcome == "hint")


def test_settings_with_another_name_mean_the_same() -> None:
    cases: tuple[tuple[dict[str, Any], str, Any], ...] = (
        ({"kv_offloading_size": 1.5}, "kv_host_memory", 3 * 2**29),
        ({"async_scheduling": False}, "steps_in_flight", 1),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "state_dtype", "bfloat16"),
        (
            {"spec_method": "ngram", "spec_tokens": 3},
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
        ({"load_format": "safetensors", "data_parallel_size": 1}, "load_format", "auto"),
        ({"quantization": "awq_marlin", "max_loras": 1}, "quantization", "awq"),
        ({"quantization": "awq_marlin"}, "quantization", "awq"),
        ({"dtype": torch.float16}, "dtype", "float16"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching", True),
        ({"enable_prefix_caching": None, "max_loras": 1}, "enable_prefix_caching", True),
    )
    for settings, name, value in cases:
        assert getattr(AsyncEngineArgs(**settings), name) == value


def test_what_is_of_the_server_or_unknown_is_named() -> None:
    cases: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"api_server_count": 2}, ConfigError, "is an option of minfer serve"),
        ({"data_parallel_size": 2}, ConfigError, "is an option of minfer serve"),
        ({"swap_space": 4}, ConfigError, "kv-host-memory keeps KV blocks"),
        ({"kv_offloading_size": "2"}, ConfigError, "a number of GiB above 0, not '2'"),
        ({"kv_offloading_size": math.inf}, ConfigError, "a number of GiB above 0"),
        ({"enable_prefix_caching": "no"}, ConfigError, "must be true or false"),
        ({"skip_tokenizer_init": "no"}, ConfigError, "must be true or false"),
        ({"model": ""}, ConfigError, "model must be the path of a checkpoint"),
        ({"max_modl_len": 4}, TypeError, r"did you mean max_model_len\?"),
    )
    for settings, error, message in cases:
        with pytest.raises(error, match=message):
            LLM(**settings)


def test_values_have_the_words_of_the_command_line() -> None:
    for value, word in (
        (None, ""),
        (True, "on"),
        (0, "0"),
        (0.5, "0.5"),
        ({}, ""),
        ({"image": 0}, '{"image":0}'),
        ("x", "x"),
    ):
        assert as_word(value) == word
