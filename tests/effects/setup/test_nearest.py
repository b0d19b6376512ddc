"""Only near words are suggested: names of fields, keys and addresses."""

import json

import pytest
from attrs import fields

from minfer.effects.serving.addresses import suggest_address
from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.setup.nearest import nearest
from minfer.effects.setup.speculation_settings import (
    SpeculativeConfig,
    speculative_config,
)
from minfer.values.checks import ConfigError
from tests.effects.serving.openai.helpers import HI, refused

NEAR = {
    "max_token": "max_tokens",
    "maxtokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "temprature": "temperature",
    "Temperature": "temperature",
    "topp": "top_p",
    "top-k": "top_k",
    "steram": "stream",
    "sedd": "seed",
    "message": "messages",
    "repeat_penalty": "repetition_penalty",
    "toolchoice": "tool_choice",
    "usr": "user",
}
FAR = (
    *("foo", "x", "images", "system", "thinking", "input", "options", "penalty"),
    *("prompts", "best", "guided", "web_search", "cache_prompt", "num_beams", "grammar"),
    *("do_sample", "session", "stop_strings"),
)


@pytest.mark.parametrize(("word", "meaning"), NEAR.items())
def test_a_near_field_is_suggested(word: str, meaning: str) -> None:
    error = refused(ChatBody, json.dumps({"messages": HI, word: 1}).encode())
    assert str(error) == f"{word}: is not a field here; did you mean {meaning}?"


@pytest.mark.parametrize("word", FAR)
def test_a_far_field_is_not(word: str) -> None:
    error = refused(ChatBody, json.dumps({"messages": HI, word: 1}).encode())
    assert str(error) == f"{word}: is not a field here; leave it out"


def test_keys_of_speculation() -> None:
    for word, hint in (
        ("methd", "did you mean method?"),
        ("num_speculative_token", "did you mean num_speculative_tokens?"),
        ("mode_of_drafts", "there are method, "),
        ("tokens", "there are method, "),
        ("prompt", "there are method, "),
        (5, "there are method, "),
    ):
        with pytest.raises(ConfigError) as caught:
            speculative_config({word: 1})
        assert f"is no key of it; {hint}" in str(caught.value)


def test_addresses() -> None:
    address = suggest_address("/v1/chat/completion")
    assert address is not None
    assert address.path == "/v1/chat/completions"
    for path in ("/v1/images", "/v1/audio/speech", "/v1/files", "/chat", "/x", "/v2"):
        assert suggest_address(path) is None


def test_the_known_words_are_near_only_themselves() -> None:
    names = [option.name for option in fields(SpeculativeConfig)]
    assert [nearest(name, names) for name in names] == names
    assert nearest("", names) is None
