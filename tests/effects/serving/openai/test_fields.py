"""The fields that endpoints share are checked, and every refusal names its own."""

import json
from typing import Any

import pytest

from minfer.effects.live.beams.beam_search import BeamSearchParams
from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.completions import CompletionBody
from minfer.records.request import ParameterError
from minfer.sampling.params import ADVISED, SamplingParams
from tests.effects.serving.openai.helpers import HI, chat, completion, refused


def test_sampling_parameters_are_those_that_were_given() -> None:
    assert completion().sampling() == {"n": 1}
    fields: dict[str, Any] = {
        "n": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -1,
        "max_tokens": 5,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "min_tokens": 2,
        "allowed_token_ids": [7, 3],
        "bad_words": ["a", "b c"],
        "frequency_penalty": 0,
    }
    assert completion(**fields).sampling() == fields
    assert completion(logit_bias={"5": -1, "007": 2.5}).sampling() == {
        "n": 1,
        "logit_bias": {5: -1, 7: 2.5},
    }
    assert completion(stop="a").sampling()["stop"] == ["a"]
    assert chat().sampling() == {"n": 1}
    assert chat(max_tokens=4).sampling()["max_tokens"] == 4
    assert chat(max_completion_tokens=4).sampling()["max_tokens"] == 4


def test_all_parameters_of_the_table_are_fields() -> None:
    assert ADVISED
    for name in ADVISED:
        assert completion(**{name: 1}).sampling() == {"n": 1, name: 1}
        assert chat(**{name: 1}).sampling() == {"n": 1, name: 1}


def test_null_is_absent() -> None:
    names = [*CompletionBody.model_fields, *CompletionBody.neutral]
    assert (
        completion(**{name: None for name in names if name != "prompt"}) == completion()
    )
    names = [*ChatBody.model_fields, *ChatBody.neutral]
    assert chat(**{name: None for name in names if name != "messages"}) == chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1},
        {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}},
        {
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "functions": [],
        },
        {
            "tool_choice": "auto",
            "modalities": ["text"],
            "store": False,
            "metadata": {"a": "b"},
        },
        {"service_tier": "auto", "prompt_cache_key": "k", "reasoning_effort": "none"},
        {"service_tier": "default", "verbosity": "medium", "suffix": ""},
        {"store": True},
        {
            "stream": True,
            "stream_options": {"include_usage": False, "include_obfuscation": False},
        },
        {"stream_options": {"include_usage": True}},
    ],
)
def test_what_asks_for_nothing_is_ignored(fields: dict[str, Any]) -> None:
    assert completion(**fields).sampling() == {"n": 1}
    fields.pop("best_of", None)
    assert chat(**fields).sampling() == {"n": 1}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": "1"}, "n", 'must be a whole number, not "1"'),
        ({"n": 1.0}, "n", "must be a whole number"),
        ({"n": True}, "n", "must be a whole number"),
        ({"n": 0}, "n", "must be at least 1, not 0"),
        ({"n": 129}, "n", "must be at most 128"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "must be a number"),
        ({"max_tokens": 10**400}, "max_tokens", "must be below"),
        ({"seed": 2**63}, "seed", "must be below"),
        ({"stop": 5}, "stop", "must be a list, not 5"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string, not 5"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "must be a whole number"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"stream": True, "stream_options": 5}, "stream_options", "must be an object"),
        (
            {"stream": True, "stream_options": {"x": 1}},
            "stream_options.x",
            "not a field here",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": 1}},
            "stream_options.include_obfuscation",
            "must be true or false",
        ),
        ({"deadline": 0}, "deadline", "must be above 0"),
        ({"priority": 2**60}, "priority", "must be below"),
        ({"user": "u" * 513}, "user", "must have at most 512 characters"),
        ({"user": 5}, "user", "must be a string"),
        ({"foo": 1}, "foo", "is not a field here; leave it out"),
        ({"foo": None}, "foo", "is not a field here"),
        ({"max_token": 1}, "max_token", "did you mean max_tokens?"),
        ({"presence_penalty": False}, "presence_penalty", "must be a number"),
        ({"logit_bias": [5]}, "logit_bias", "must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'token ids as whole numbers, not "x"'),
        ({"logit_bias": {"-1": 1}}, "logit_bias", 'token ids as whole numbers, not "-1"'),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias", "is in it twice"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[5]", "must be a number"),
        ({"allowed_token_ids": 5}, "allowed_token_ids", "must be a list"),
        ({"allowed_token_ids": [0] * 70_000}, "allowed_token_ids", "65536"),
        ({"bad_words": "x"}, "bad_words", "must be a list"),
        ({"min_tokens": 0.5}, "min_tokens", "must be a whole number"),
        ({"logprobs": -1}, "logprobs", "must be"),
        ({"logprobs": "a"}, "logprobs", "must be "),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"store": "yes"}, "store", "must be true or false"),
        ({"skip_special_tokens": 0}, "skip_special_tokens", "must be true or false"),
        ({"service_tier": "fast"}, "service_tier", "must be 'auto'"),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.type",
            "not supported",
        ),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"reasoning_effort": "much"}, "reasoning_effort", ""),
        ({"reasoning_effort": 1}, "reasoning_effort", ""),
        ({"verbosity": "loud"}, "verbosity", ""),
    ],
)
def test_a_refused_field_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    for kind, needed in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": HI})):
        error = refused(kind, json.dumps({**needed, **fields}).encode())
        assert (error.param, str(error).split(":")[0]) == (param, param)
        assert words in str(error)


def test_log_probabilities_are_requested_in_two_ways() -> None:
    for k in (0, 3, 20):
        assert completion(logprobs=k).sampling()["logprobs"] == k
        assert chat(logprobs=True, top_logprobs=k).sampling()["logprobs"] == k
    assert chat(logprobs=True).sampling()["logprobs"] == 0
    echoed = completion(logprobs=2, echo=True, prompt_logprobs=1).sampling()
    assert (echoed["logprobs"], echoed["prompt_logprobs"]) == (2, 2)
    for fields, param, words in (
        ({"logprobs": True}, "logprobs", "must be a whole number, not true"),
        ({"logprobs": 21}, "logprobs", "must be at most 20"),
        ({"top_logprobs": 1}, "top_logprobs", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"tool_choice": "required"}, "tool_choice", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"verbosity": "low"}, "verbosity", "not supported"),
    ):
        error = refused(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())
        assert error.param == param
        assert words in str(error)
    for fields, param, words in (
        ({"logprobs": 0}, "logprobs", "must be true or false, not 0"),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "must be at most 20",
        ),
        ({"top_logprobs": 1}, "top_logprobs", "needs logprobs to be true"),
        (
            {"logprobs": False, "top_logprobs": 1},
            "top_logprobs",
            "needs logprobs to be true",
        ),
    ):
        error = refused(ChatBody, json.dumps({"messages": HI, **fields}).encode())
        assert error.param == param
        assert words in str(error)


def test_a_beam_search_goes_with_fields_that_ask_for_nothing() -> None:
    nothing: dict[str, Any] = {
        "response_format": {"type": "text"},
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "min_tokens": 0,
        "logit_bias": {},
        "bad_words": [],
        "stop": [],
    }
    for body in (completion, chat):
        assert body(use_beam_search=True, n=2, **nothing).search(4) is not None
    assert completion(use_beam_search=True, echo=True).search(4) is not None


def test_best_of_is_the_width_of_a_search_and_no_number_of_samples() -> None:
    request_fields = completion(use_beam_search=True, best_of=4)
    assert "best_of" not in request_fields.sampling()
    assert completion(best_of=4).sampling()["best_of"] == 4
    with pytest.raises(ParameterError, match="max_tokens"):
        request_fields.search(0)


def test_a_beam_search_is_requested_as_in_vllm() -> None:
    request_fields = completion(use_beam_search=True, n=3, max_tokens=5)
    assert request_fields.search(5) == BeamSearchParams(beam_width=3, n=3, max_tokens=5)
    fields: dict[str, Any] = {
        "use_beam_search": True,
        "best_of": 4,
        "n": 2,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "ignore_eos": True,
        "temperature": 0,
        "top_p": 1,
    }
    for body in (completion(**fields), chat(**fields)):
        assert body.search(None) == BeamSearchParams(
            beam_width=4,
            n=2,
            max_tokens=None,
            length_penalty=0.5,
            early_stopping="never",
            ignore_eos=True,
        )
        request = body.request([], SamplingParams(temperature=0.7))
        assert request.params == request.beams.sampling if request.beams else False
        assert (request.width, request.params.n, request.params.temperature) == (4, 2, 0)
    assert completion(n=3).search(5) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 17}, "n"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": {}}, "guided_json"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
)
def test_a_beam_search_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    body = {"prompt": "x", "use_beam_search": True, **fields}
    error = refused(CompletionBody, json.dumps(body).encode())
    assert (error.param or "").split(".")[0] == param
