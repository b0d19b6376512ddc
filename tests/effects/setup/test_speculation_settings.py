"""What a server may be told of speculation, and what it makes of it."""

from typing import Any

import pytest

from minfer.effects.setup.speculation_settings import (
    MAX_HEAD_DRAFT_ROWS,
    MAX_HOST_DRAFT_ROWS,
    SpeculativeConfig,
    speculative_config,
)
from minfer.records.speculation import DEVICE, HOST, REJECTION, SAME_NOISE
from minfer.speculate.lookup import Lookup
from minfer.values.checks import ConfigError


def config(**keys: Any) -> SpeculativeConfig:
    settings = speculative_config(keys)
    assert settings is not None
    return settings


def test_nothing_is_no_speculation() -> None:
    assert speculative_config(None) is None
    settings = config(method="ngram")
    assert speculative_config(settings) is settings


def test_a_request_looks_in_itself_or_in_others_too() -> None:
    assert config(method="ngram").proposer == Lookup(max_scope_tokens=0)
    assert config(method="suffix").proposer == Lookup()
    short_matches = config(method="ngram", prompt_lookup_min=2, prompt_lookup_max=5)
    assert short_matches.proposer == Lookup(min_match=2, max_match=5, max_scope_tokens=0)
    assert config(method="suffix", prompt_lookup_max=2).lookup_lengths == (2, 2)
    assert config(method="suffix", prompt_lookup_min=50).lookup_lengths == (50, 50)


def test_the_engine_gets_the_drafter_and_the_number_of_drafts() -> None:
    by_host = config(method="suffix", num_speculative_tokens=7).speculation
    assert (by_host.drafter, by_host.drafts, by_host.rows) == (
        HOST,
        7,
        MAX_HOST_DRAFT_ROWS,
    )
    model = config(model="org/small", disable_by_batch_size=9)
    assert model.proposer is None
    reported = model.speculation
    assert (reported.drafter, reported.rows, reported.adaptive) == (DEVICE, 9, False)


def test_heads_are_the_devices_drafters_in_larger_steps() -> None:
    for keys in ({"method": "mtp"}, {"method": "eagle3", "model": "org/head"}):
        head = config(**keys)
        assert head.proposer is None
        assert head.speculation.drafter == DEVICE
        assert head.speculation.rows == MAX_HEAD_DRAFT_ROWS


def test_older_names_of_vllm_are_mtp() -> None:
    assert config(method="qwen3_next_mtp").method == "mtp"


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "mtp"])
def test_which_drafts_stand_goes_with_every_method(method: str) -> None:
    assert config(method=method).speculation.rule == SAME_NOISE
    for name, rule in (("same_noise", SAME_NOISE), ("standard", REJECTION)):
        reported = config(method=method, rejection_sample_method=name)
        assert reported.speculation.rule == rule


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (7, "must be a mapping of its keys, not 7"),
        ({}, "needs a method: one of ngram, suffix, draft_model, mtp, eagle3"),
        ({"method": "medusa"}, "method 'medusa' is not supported; choose one of ngram"),
        ({"method": "eagle3"}, "eagle3 needs a model: the path of the head"),
        ({"method": "mtp", "model": "m"}, "'draft_model' and 'eagle3', not with 'mtp'"),
        ({"method": "mtp", "prompt_lookup_max": 2}, "prompt_lookup_max goes with ngram"),
        ({"method": "magic"}, "method must be one of ngram, suffix, draft_model"),
        ({"method": ["ngram"]}, "method must be one of"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64, not 0"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64, not 65"),
        ({"method": "ngram", "num_speculative_tokens": True}, "not True"),
        ({"method": "ngram", "num_speculative_tokens": 10**99}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 10**9999}, "not one that large"),
        ({"method": "ngram", "num_speculative_tokens": None}, "from 1 to 64, not None"),
        ({"method": "ngram", "model": "m"}, "model goes with the methods 'draft_model'"),
        ({"method": "draft_model", "model": 7}, "must be the path of a checkpoint"),
        ({"method": "draft_model", "model": ""}, "must be the path of a checkpoint"),
        ({"model": "m", "prompt_lookup_min": 2}, "prompt_lookup_min goes with ngram"),
        ({"method": "suffix", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "at most"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "from 1 to"),
        ({"method": "ngram", "adaptive": 1}, "adaptive must be true or false"),
        (
            {"method": "ngram", "rejection_sample_method": "block"},
            "rejection_sample_method must be 'same_noise' or 'standard', not 'block'",
        ),
        (
            {"method": "ngram", "rejection_sample_method": ["same_noise"]},
            "not \\['same_noise'",
        ),
    ],
)
def test_what_is_impossible_is_reported_with_its_key(keys: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        speculative_config(keys)
    assert str(raised.value).startswith("speculative_config")
