"""Anthropic's SDK against POST /v1/messages."""

import asyncio
from typing import Any, Final

import pytest

from tests.effects.scripted import hermes, say
from tests.effects.serving.sdk.cases import Table
from tests.effects.serving.sdk.servers import KEY, Servers

TABLE: Final = Table("anthropic", ("anthropic", "minfer.effects.serving.anthropic"))
case: Final = TABLE
REQUESTED: Final[dict[str, Any]] = {
    "model": "bundled",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Write a Python function is_prime."}],
    "temperature": 0,
}
# What its second major version took out of the signatures goes as extra fields.
_EXTRA: Final = ("temperature", "top_k", "top_p")


def parameters(**overrides: Any) -> dict[str, Any]:
    """Arguments of a message, whichever of them the SDK's version has by name."""
    fields = {**REQUESTED, **overrides}
    extra = {name: fields.pop(name) for name in _EXTRA if name in fields}
    return {**fields, "extra_body": extra}


def to(servers: Servers, **overrides: Any) -> Any:
    """A client of the bundled model."""
    import anthropic

    settings = {"base_url": servers.bundled.url, "api_key": "-", "max_retries": 0}
    return servers.kept(anthropic.Anthropic(**{**settings, **overrides}))


@case("messages.create: a text block, why it ended, usage")
def _(servers: Servers) -> None:
    message = to(servers).messages.create(**parameters())
    (block,) = message.content
    assert (message.type, message.role, block.type) == ("message", "assistant", "text")
    assert block.text
    assert message.stop_reason == "max_tokens"
    assert (message.usage.output_tokens, message.usage.input_tokens > 0) == (8, True)


@case("messages.create: an answer handed back as the SDK made it, and a system")
def _(servers: Servers) -> None:
    client = to(servers)
    first = client.messages.create(**parameters(system="You write Python."))
    messages = [
        *REQUESTED["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "And its name?"}]},
    ]
    assert client.messages.create(**parameters(messages=messages)).content[0].text


@case("messages.create(stop_sequences=...): the text ends before it")
def _(servers: Servers) -> None:
    client = to(servers)
    text = client.messages.create(**parameters()).content[0].text
    stop = text[4:6]
    message = client.messages.create(**parameters(stop_sequences=[stop]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


@case("messages.create(stream=True): events in Anthropic's order")
def _(servers: Servers) -> None:
    kinds = [
        event.type for event in to(servers).messages.create(**parameters(), stream=True)
    ]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "content_block_delta" in kinds


@case("messages.stream(): text as it comes, and the message put together")
def _(servers: Servers) -> None:
    client = to(servers)
    with client.messages.stream(**parameters()) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text
    assert text == client.messages.create(**parameters()).content[0].text
    assert message.usage.output_tokens == 8


@case("messages.count_tokens: what the message then costs")
def _(servers: Servers) -> None:
    client = to(servers)
    talk = {name: REQUESTED[name] for name in ("model", "messages")}
    counted = client.messages.count_tokens(**talk).input_tokens
    usage = client.messages.create(**parameters()).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@case("AsyncAnthropic: many at once")
def _(servers: Servers) -> None:
    import anthropic

    async def all_of_them() -> set[str]:
        settings: dict[str, Any] = {"base_url": servers.bundled.url, "api_key": "-"}
        async with anthropic.AsyncAnthropic(**settings) as client:
            requests = (client.messages.create(**parameters()) for _ in range(4))
            return {
                str(message.content[0].text)
                for message in await asyncio.gather(*requests)
            }

    assert len(asyncio.run(all_of_them())) == 1


@case("BadRequestError, NotFoundError: with Anthropic's type of error")
def _(servers: Servers) -> None:
    import anthropic

    client = to(servers)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**parameters(messages=[]))
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**parameters(model="claude-9"))


@case("AuthenticationError: a wrong x-api-key")
def _(servers: Servers) -> None:
    import anthropic

    wrong = to(servers, base_url=servers.locked.url, api_key="guess")
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**parameters())
    right = to(servers, base_url=servers.locked.url, api_key=KEY)
    assert right.models.list().data[0].id == "tiny"


ADD: Final[dict[str, Any]] = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TWO: Final = hermes(("add", {"a": 1}), ("add", {"a": 2}))


def calling(servers: Servers, text: str) -> tuple[Any, dict[str, Any]]:
    """A client whose answers are a text, and what to ask for."""
    say(servers.talker.llm, text)
    client = to(servers, base_url=servers.talker.url)
    return client, parameters(model="tiny", max_tokens=400, tools=[ADD])


@case("messages.create(tools=...): tool_use blocks, and a message of results")
def _(servers: Servers) -> None:
    client, fields = calling(servers, f"<think>Hm.</think>I add.\n{TWO}")
    first = client.messages.create(**fields)
    assert first.stop_reason == "tool_use"
    thought, text, *calls = first.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "I add.")
    assert [(call.name, call.input) for call in calls] == [
        ("add", {"a": 1}),
        ("add", {"a": 2}),
    ]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls
    ]
    say(servers.talker.llm, "3.")
    messages = [
        *fields["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**{**fields, "messages": messages})
    assert (second.content[0].text, second.stop_reason) == ("3.", "end_turn")


@case("messages.stream(tools=...): input that adds up, and the same message")
def _(servers: Servers) -> None:
    client, fields = calling(servers, f"I add.\n{TWO}")
    with client.messages.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop"} <= kinds
    assert last.stop_reason == "tool_use"
    assert [block.type for block in last.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in last.content[1:]] == [{"a": 1}, {"a": 2}]


@case("messages.create(tool_choice=...): a call that must be made, after reasoning")
def _(servers: Servers) -> None:
    call_text = hermes(("add", {"a": 1}))
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        client, fields = calling(servers, f"<think>Hm.</think>{call_text}")
        first = client.messages.create(**fields, tool_choice=choice)
        assert first.stop_reason == "tool_use"
        thought, call = first.content
        assert (thought.thinking, call.input) == ("Hm.", {"a": 1})


@case("messages.count_tokens(tools=...): tools count")
def _(servers: Servers) -> None:
    client, fields = calling(servers, "")
    conversation = {"model": "tiny", "messages": fields["messages"]}
    plain_count, tools_count = (
        client.messages.count_tokens(**conversation, **extra).input_tokens
        for extra in ({}, {"tools": [ADD]})
    )
    assert tools_count > plain_count + 50


@case("models.list, models.retrieve: in Anthropic's shape")
def _(servers: Servers) -> None:
    client = to(servers)
    model, *_ = client.models.list()
    assert (model.id, model.type) == ("bundled", "model")
    assert client.models.retrieve("bundled").display_name == "bundled"
