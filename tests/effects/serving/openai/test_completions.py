"""Completions: which prompts may be sent, and answers as OpenAI's SDK reads them."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from minfer import LLM, BeamSearchParams, SamplingParams
from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.application import Application
from minfer.effects.serving.openai.completions import CompletionBody
from minfer.effects.serving.openai.fields import MAX_ITEMS
from tests.effects.serving.openai.helpers import (
    GREEDY,
    HI,
    completion,
    refused,
)
from tests.effects.serving.raw_requests import asgi

# Fields that OpenAI's SDK does not know.
EXTRA = {"repetition_penalty", "allowed_token_ids", "bad_words", "typical_p"}


@pytest.fixture(scope="module")
def library() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=64, dtype="float32") as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ([], [[]]),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * (MAX_ITEMS + 1)}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt": ["a"] * 100, "best_of": 100}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "b"}, "suffix"),
        ({"echo": "yes"}, "echo"),
        ({"messages": HI}, "messages"),
    ],
)
def test_a_completion_that_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    error = refused(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())
    assert error.param == param


@pytest.mark.long
def test_completions_are_those_of_the_library(client: OpenAI) -> None:
    with LLM(num_gpu_blocks_override=64) as llm:
        assert llm.tokenizer is not None
        tokens = llm.tokenizer.encode("def add(a")
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [
            o.outputs[0].text for o in llm.generate(["def add(a", "import "], params)
        ]
    prompts: list[Any] = ["def add(a", tokens, ["def add(a"], [tokens]]
    for prompt in prompts:
        completion = client.completions.create(model="bundled", prompt=prompt, **GREEDY)
        assert [c.text for c in completion.choices] == expected[:1]
        assert completion.object == "text_completion"
        assert completion.model == "bundled"
    two_prompts = client.completions.create(
        model="alias/of-it", prompt=["def add(a", "import "], **GREEDY
    )
    assert [(c.index, c.text) for c in two_prompts.choices] == list(enumerate(expected))
    assert two_prompts.usage is not None
    assert two_prompts.usage.completion_tokens <= 24
    assert (
        two_prompts.usage.total_tokens
        == two_prompts.usage.prompt_tokens + two_prompts.usage.completion_tokens
    )


@pytest.mark.long
def test_a_beam_search_is_that_of_the_library(client: OpenAI) -> None:
    with LLM(num_gpu_blocks_override=64) as llm:
        (best,) = llm.beam_search(
            "def add(a", BeamSearchParams(beam_width=4, n=2, max_tokens=8)
        )
    expected = [output.text for output in best.request.outputs]
    search = {"use_beam_search": True, "best_of": 4}
    request_fields: Any = {
        "model": "bundled",
        "max_tokens": 8,
        "n": 2,
        "extra_body": search,
    }
    completion = client.completions.create(prompt="def add(a", **request_fields)
    assert [choice.text for choice in completion.choices] == expected
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 16
    hello: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(messages=hello, **request_fields)
    assert len({choice.message.content for choice in answer.choices}) == 2
    request_fields["extra_body"] = {**search, "length_penalty": 2.0**60}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="x", **request_fields)
    assert caught.value.param == "length_penalty"


@pytest.mark.long
def test_what_min_p_leaves_is_greedy_if_only_the_likeliest_may_come(
    client: OpenAI,
) -> None:
    request_fields: Any = {
        "model": "bundled",
        "prompt": "def add(a",
        "max_tokens": 12,
        "seed": 3,
    }
    greedy, only_likeliest, all_of_it = (
        client.completions.create(
            temperature=heat, extra_body={"min_p": min_p}, **request_fields
        )
        for heat, min_p in ((0, 0), (3, 1), (3, 0))
    )
    assert (
        only_likeliest.choices[0].text
        == greedy.choices[0].text
        != all_of_it.choices[0].text
    )


@pytest.mark.long
def test_cached_tokens_are_counted(client: OpenAI) -> None:
    prompt = "x = 1\n" * 200
    for salt, cached in (("a", False), ("a", True), ("b", False)):
        completion = client.completions.create(
            model="bundled", prompt=prompt, extra_body={"cache_salt": salt}, **GREEDY
        )
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert bool(completion.usage.prompt_tokens_details.cached_tokens) == cached


@pytest.mark.long
def test_samples_and_seeds(client: OpenAI) -> None:
    def sampled(seed: int) -> list[str]:
        completion = client.completions.create(
            model="bundled", prompt="def ", n=3, seed=seed, temperature=1, max_tokens=10
        )
        return [c.text for c in completion.choices]

    first = sampled(7)
    assert len(set(first)) == 3
    assert sampled(7) == first
    assert sampled(8) != first


def test_stop_strings_echo_and_lengths(client: OpenAI) -> None:
    text = (
        client.completions.create(model="bundled", prompt="def add(a", **GREEDY)
        .choices[0]
        .text
    )
    stop = text[4:7]
    completion = client.completions.create(
        model="bundled", prompt="def add(a", stop=stop, **GREEDY
    )
    assert completion.choices[0].text == text[: text.index(stop)]
    assert completion.choices[0].finish_reason == "stop"
    options: dict[str, Any] = {"include_stop_str_in_output": True}
    chunks = client.completions.create(
        model="bundled",
        prompt="def add(a",
        stop=stop,
        stream=True,
        extra_body=options,
        **GREEDY,
    )
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    assert streamed == completion.choices[0].text + stop
    completion = client.completions.create(
        model="bundled", prompt="def add(a", echo=True, temperature=0, max_tokens=1
    )
    assert completion.choices[0].text.startswith("def add(a")
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 1
    ids = client.completions.create(
        model="bundled", prompt=[[300, 301]], echo=True, temperature=0, max_tokens=1, n=2
    )
    assert len({c.text for c in ids.choices}) == 1


def test_without_a_tokenizer_there_is_no_text_to_echo() -> None:
    body = {"prompt": [[5, 6]], "echo": True, "max_tokens": 2}
    with contextlib.closing(AsyncLLM(executor="dry", skip_tokenizer_init=True)) as llm:
        app = Application(llm, ["dry"])
        start, body_message = asyncio.run(
            asgi(app, "/v1/completions", json.dumps(body).encode())
        )
    assert start["status"] == 200
    assert json.loads(body_message["body"])["choices"][0]["text"] == ""


@pytest.mark.long
def test_a_streamed_completion_joins_to_the_whole(client: OpenAI) -> None:
    request_fields: dict[str, Any] = {
        "model": "bundled",
        "prompt": ["def ", "class "],
        "n": 2,
        "seed": 1,
        "max_tokens": 15,
        "echo": True,
    }
    completion = client.completions.create(**request_fields)
    texts, ends, usage = [""] * 4, [""] * 4, None
    with client.completions.create(
        **request_fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            assert usage is None
            usage = chunk.usage
            assert bool(chunk.choices) == (usage is None)
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] += choice.finish_reason or ""
    assert texts == [c.text for c in completion.choices]
    assert ends == [c.finish_reason for c in completion.choices]
    assert usage is not None
    assert completion.usage is not None
    assert usage.total_tokens == completion.usage.total_tokens
    with client.completions.create(**request_fields, stream=True) as stream:
        assert all(chunk.usage is None and chunk.choices for chunk in stream)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 2},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.7},
        {"logit_bias": {300: 90, 13: -100}},
        {"allowed_token_ids": [300, 301, 302, 303]},
        {"bad_words": ["import", " import"]},
        # The server's own top_p is the model's.
        {"typical_p": 0.3, "temperature": 1, "top_p": 1, "seed": 5},
    ],
    ids=str,
)
def test_tokens_are_pushed_and_hidden_as_by_the_library(
    client: OpenAI, library: LLM, fields: dict[str, Any]
) -> None:
    prompt = "import os\nimport sys\n"
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, **fields})
    (output,) = library.generate([prompt], params)
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRA}
    completion = client.completions.create(
        **{
            "model": "bundled",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 24,
            **fields,
            "extra_body": extra,
        }
    )
    assert completion.choices[0].text == output.outputs[0].text
    plain = library.generate([prompt], SamplingParams(temperature=0, max_tokens=24))
    assert completion.choices[0].text != plain[0].outputs[0].text


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", None),
        ({"top_p": 2}, "top_p", None),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": 0, "n": 2}, "n", None),
        ({"max_tokens": 0, "best_of": 2, "stream": False}, "best_of", None),
        ({"prompt": ""}, "prompt", None),
        ({"prompt": [[99_999]]}, "prompt", None),
        ({"prompt": "a " * 3000}, "prompt", "context_length_exceeded"),
        ({"prompt": ["ok", "a " * 3000]}, "prompt", "context_length_exceeded"),
        ({"stop": [""]}, "stop", None),
        ({"stop": ["a"] * 65}, "stop", None),
        ({"stop": "a" * 1025}, "stop", None),
        ({"logprobs": 21, "echo": True}, "logprobs", None),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs", None),
        ({"presence_penalty": 3}, "presence_penalty", None),
        ({"extra_body": {"stop_token_ids": [99_999]}}, "stop_token_ids", None),
        ({"extra_body": {"top_k": -5}}, "top_k", None),
        ({"extra_body": {"min_p": 2}}, "min_p", None),
        ({"frequency_penalty": -2.5}, "frequency_penalty", None),
        ({"logit_bias": {"5": 101}}, "logit_bias", None),
        ({"logit_bias": {"99999": 1}}, "logit_bias", None),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty", None),
        ({"extra_body": {"typical_p": 0}}, "typical_p", None),
        ({"extra_body": {"min_tokens": 17}}, "min_tokens", None),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids", None),
        ({"extra_body": {"allowed_token_ids": [99_999]}}, "allowed_token_ids", None),
        ({"extra_body": {"bad_words": [""]}}, "bad_words", None),
    ],
)
def test_errors_of_completions(
    client: OpenAI, fields: dict[str, Any], param: str, code: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(
                **{"model": "bundled", "prompt": "x", "stream": stream, **fields}
            )
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.type == "invalid_request_error"
