"""Fields that clients of other servers send: vLLM's, hints, and neutral values."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minfer.effects.serving.openai.chat_completions import ChatBody
from minfer.effects.serving.openai.completions import CompletionBody
from minfer.effects.text.outputs import Logprob
from tests.effects.scripted import TEMPLATE
from tests.effects.served import Serving, events
from tests.effects.serving.openai.helpers import (
    HI,
    chat,
    completion,
    delta,
    read,
    refused,
    served,
    writer_of,
)
from tests.effects.serving.scripted_model import agent_server, script

ANSWER = "<think>\nHm.\n</think>\n\nYes."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    with agent_server(tmp_path_factory.mktemp("fields") / "m", template) as server:
        yield server


def whole(server: Serving, path: str, **fields: Any) -> Any:
    with script(server, [ANSWER]):
        response = server.post(path, model="tiny", temperature=0, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Serving, path: str, **fields: Any) -> list[Any]:
    with script(server, [ANSWER]):
        fields = {"model": "tiny", "temperature": 0, "stream": True, **fields}
        response = server.post(path, **fields)
    assert response.status_code == 200, response.text
    return list(events(iter(response.text.split("\n"))))


PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"messages": HI}),
    ("completions", {"prompt": "hi", "max_tokens": len(ANSWER)}),
]


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_usage_grows_from_chunk_to_chunk(
    server: Serving, path: str, prompt: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = chunks(server, path, stream_options=options, **prompt)
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == stream[-1]["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in stream} == {
        stream[-1]["usage"]["prompt_tokens"]
    }
    stats_only = chunks(
        server, path, stream_options={"continuous_usage_stats": True}, **prompt
    )
    assert all(chunk["usage"]["total_tokens"] for chunk in stats_only)


@pytest.mark.parametrize(("path", "prompt"), PROMPTS)
def test_token_ids_come_with_an_answer(
    server: Serving, path: str, prompt: dict[str, Any]
) -> None:
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    answer = whole(server, path, return_token_ids=True, **prompt)
    (choice,) = answer["choices"]
    assert ANSWER.startswith(tokenizer.decode(choice["token_ids"]))
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    ids = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"]
    stream = chunks(server, path, return_token_ids=True, **prompt)
    first = (
        stream[0].get("prompt_token_ids") or stream[0]["choices"][0]["prompt_token_ids"]
    )
    assert first == ids
    assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in stream) == 1
    joined = [
        token for chunk in stream for token in chunk["choices"][0].get("token_ids") or ()
    ]
    assert joined == choice["token_ids"]


def test_tokens_of_log_probabilities_may_be_ids() -> None:
    scores = [{7: Logprob(-1.0, 1, "a"), 9: Logprob(-2.0, 2, "b")}]
    writer = writer_of(
        chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    )
    writer.write(0, delta("a", "stop", scores))
    (answer,) = read(writer.end(served(1, 1, 0)))
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert token["token"] == "token_id:7"  # noqa: S105 - no password
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:7", "token_id:9"]
    writer = writer_of(completion(logprobs=2, return_tokens_as_token_ids=True))
    writer.write(0, delta("a", "stop", scores))
    (answer,) = read(writer.end(served(1, 1, 0)))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:7"]
    assert logprobs["top_logprobs"] == [{"token_id:9": -2.0, "token_id:7": -1.0}]


def test_a_prompt_is_cut_to_its_last_tokens(server: Serving) -> None:
    cut = completion(prompt=["abcdef", [1, 2, 3, 4]], truncate_prompt_tokens=3)
    prompts = cut.generation(server.llm).prompts
    assert server.llm.tokenizer is not None
    last = server.llm.tokenizer.encode("def", add_special_tokens=False)
    assert [list(prompt.ids) for prompt in prompts] == [last, [2, 3, 4]]
    echoed = completion(prompt="abcdef", truncate_prompt_tokens=3, echo=True)
    assert echoed.generation(server.llm).include.echo == ("def",)
    whole_ids = chat().generation(server.llm).prompts[0].ids
    ids = chat(truncate_prompt_tokens=4).generation(server.llm).prompts[0].ids
    assert list(ids) == list(whole_ids)[-4:]
    context = server.llm.setup.config.max_model_len
    long = completion(prompt="a" * context, truncate_prompt_tokens=-1, max_tokens=8)
    assert len(long.generation(server.llm).prompts[0].ids) == context - 8
    response = server.post("completions", prompt="a", truncate_prompt_tokens=context + 1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


def test_a_request_is_known_by_the_id_in_its_body(server: Serving) -> None:
    answer = whole(server, "chat/completions", messages=HI, request_id="mine-1")
    record = server.get("/v1/requests/mine-1").json()
    assert (record["id"], record["request_id"]) == (answer["id"], "mine-1")


@pytest.mark.parametrize("included", [True, False])
def test_reasoning_may_be_left_out(server: Serving, included: bool) -> None:
    fields = {"messages": HI, "include_reasoning": included}
    answer = whole(server, "chat/completions", **fields)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    deltas = [
        choice["delta"]
        for chunk in chunks(server, "chat/completions", **fields)
        for choice in chunk["choices"]
    ]
    reasoning = "Hm." if included else ""
    for messages in ([answer["choices"][0]["message"]], deltas):
        texts = {
            name: "".join(message.get(name) or "" for message in messages)
            for name in ("content", "reasoning", "reasoning_content")
        }
        assert texts.pop("content") == "Yes."
        assert {*texts.values()} == {reasoning}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_usage_counts_reasoning_tokens(server: Serving, path: str, stream: bool) -> None:
    prompt: dict[str, Any] = {"input": "hi"} if path == "responses" else {"messages": HI}
    if path == "messages":
        prompt["max_tokens"] = 50
    with script(server, [ANSWER]):
        if stream and path == "chat/completions":
            prompt["stream_options"] = {"include_usage": True}
        response = server.post(path, model="tiny", stream=stream, **prompt)
    if not stream:
        usage = response.json()["usage"]
    else:
        lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
        last = json.loads(lines[-2 if path == "messages" else -1].removeprefix("data: "))
        usage = last.get("usage") or last["response"]["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    name = "thinking_tokens" if path == "messages" else "reasoning_tokens"
    assert details == {name: len("Hm.")}


def test_both_lengths_may_be_given_if_they_are_equal() -> None:
    body = chat(max_tokens=5, max_completion_tokens=5)
    assert body.sampling()["max_tokens"] == 5
    data = {"messages": HI, "max_tokens": 5, "max_completion_tokens": 6}
    assert refused(ChatBody, json.dumps(data).encode()).param == "max_tokens"


def test_an_assistants_null_is_taken_back() -> None:
    fields: list[dict[str, Any]] = [
        {"content": None},
        {},
        {"content": None, "tool_calls": []},
    ]
    for sent in fields:
        message = {"role": "assistant", **sent}
        turns = [turn.to_turn() for turn in chat(messages=[*HI, message, *HI]).messages]
        assert turns[1] == {"role": "assistant", "content": ""}
    for role in ("user", "system"):
        data = json.dumps({"messages": [{"role": role, "content": None}]}).encode()
        assert refused(ChatBody, data).param == "messages[0].content"


NEUTRAL: dict[str, Any] = {
    "add_special_tokens": False,
    "chat_template": None,
    "documents": [],
    "echo": False,
    "guided_decoding_backend": None,
    "include_reasoning": True,
    "kv_transfer_params": None,
    "logits_processors": None,
    "mm_processor_kwargs": None,
    "request_id": "",
    "return_token_ids": False,
    "return_tokens_as_token_ids": None,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stream_options": None,
    "truncate_prompt_tokens": None,
    "truncation_side": "left",
    "vllm_xargs": None,
}


def test_neutral_values_are_taken() -> None:
    not_null = {name: value for name, value in NEUTRAL.items() if value is not None}
    cases = [{name: None} for name in NEUTRAL] + [{k: v} for k, v in not_null.items()]
    for fields in cases:
        chat(**fields)
        if "include_reasoning" not in fields:
            completion(**fields)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatBody, {"add_special_tokens": True}),
        (ChatBody, {"include_reasoning": "no"}),
        (ChatBody, {"chat_template": 5}),
        (ChatBody, {"chat_template": ["x"]}),
        (ChatBody, {"chat_template": "x" * 65_537}),
        (ChatBody, {"chat_template": "é" * 32_769}),
        (CompletionBody, {"chat_template": "x"}),
        (ChatBody, {"documents": [{"text": "x"}]}),
        (CompletionBody, {"include_reasoning": True}),
        (CompletionBody, {"truncate_prompt_tokens": -2}),
        (CompletionBody, {"truncate_prompt_tokens": 0}),
        (CompletionBody, {"truncate_prompt_tokens": "1"}),
        (CompletionBody, {"return_token_ids": 1}),
        (CompletionBody, {"return_tokens_as_token_ids": "yes"}),
        (CompletionBody, {"request_id": 5}),
        (CompletionBody, {"request_id": "x" * 129}),
        (CompletionBody, {"add_special_tokens": 0}),
        (CompletionBody, {"prompt_cache_key": {}}),
    ],
)
def test_other_values_are_refused(kind: type[Any], fields: dict[str, Any]) -> None:
    prompt = {"messages": HI} if kind is ChatBody else {"prompt": "x"}
    error = refused(kind, json.dumps({**prompt, **fields}).encode())
    assert [error.param] == [*fields]


def test_hints_are_named_in_a_header(server: Serving) -> None:
    hints: dict[str, Any] = {
        "prompt_cache_key": "k",
        "service_tier": "flex",
        "store": True,
        "stream_options": {"include_obfuscation": True},
    }
    names = {
        "prompt_cache_key",
        "service_tier",
        "store",
        "stream_options.include_obfuscation",
    }
    for path, fields in (
        ("chat/completions", {"messages": HI, "prediction": {"type": "content"}}),
        ("responses", {"input": "hi", "truncation": "auto"}),
    ):
        with script(server, [ANSWER]):
            response = server.post(path, model="tiny", **hints, **fields)
        assert response.status_code == 200, response.text
        named = set(response.headers["x-minfer-ignored"].split(", "))
        assert named == {*names, "prediction" if "messages" in fields else "truncation"}
