"""OpenAI's SDK: calls of tools, and reasoning."""

import json
from typing import Any, Final

import openai
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.effects.scripted import hermes, say
from tests.effects.serving.sdk.openai_answers import TABLE
from tests.effects.serving.sdk.servers import Servers

case: Final = TABLE
REQUESTED: Final[dict[str, Any]] = {
    "model": "tiny",
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the weather?"}],
}
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Final[Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
TWO: Final = hermes(("weather", {"city": "Zürich"}), ("weather", {"city": "Bern"}))
CITIES: Final = [{"city": "Zürich"}, {"city": "Bern"}]


class Weather(BaseModel):
    """A tool as the SDK makes it of a class."""

    city: str


def to(servers: Servers) -> OpenAI:
    """A client of the model that says what it is told."""
    url = f"{servers.talker.url}/v1"
    return servers.kept(OpenAI(base_url=url, api_key="-", max_retries=0))


@case("chat.completions.create(tools=...): calls, and an answer to their answers")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, TWO)
    first = client.chat.completions.create(**REQUESTED, tools=[WEATHER]).choices[0]
    assert first.finish_reason == "tool_calls"
    calls: list[Any] = first.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == CITIES
    answers = [
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in calls
    ]
    messages: Any = [*REQUESTED["messages"], first.message, *answers]
    say(servers.talker.llm, "It rains.")
    fields = {**REQUESTED, "messages": messages, "tools": [WEATHER]}
    second = client.chat.completions.create(**fields).choices[0]
    assert (second.message.content, second.finish_reason) == ("It rains.", "stop")


@case("chat.completions.create(tools=..., stream=True): fragments that add up")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, TWO)
    fragments: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(
        **REQUESTED, tools=[WEATHER], stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function
            if call.id:
                assert (call.type, call.function.name) == ("function", "weather")
            fragments.setdefault(call.index, []).append(call.function.arguments or "")
    assert [json.loads("".join(fragments[index])) for index in (0, 1)] == CITIES


@case("chat.completions.stream(tools=...): events, and the same message")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, f"I look.\n{TWO}")
    tool = pydantic_function_tool(Weather, name="weather")
    with client.chat.completions.stream(**REQUESTED, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    choice = "tool_calls.function.arguments.done"
    assert {"content.delta", choice, "tool_calls.function.arguments.delta"} <= kinds
    assert (last.finish_reason, last.message.content) == ("tool_calls", "I look.")
    calls = last.message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [
        Weather(city="Zürich"),
        Weather(city="Bern"),
    ]


@case("chat.completions.parse(tools=...): arguments as objects of a class")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, TWO)
    tool = pydantic_function_tool(Weather, name="weather")
    choice = client.chat.completions.parse(**REQUESTED, tools=[tool]).choices[0]
    calls = choice.message.tool_calls or []
    assert calls[0].function.parsed_arguments == Weather(city="Zürich")
    messages: Any = [*REQUESTED["messages"], choice.message]
    say(servers.talker.llm, "Hm.")
    fields = {**REQUESTED, "messages": messages, "tools": [WEATHER]}
    assert client.chat.completions.create(**fields).choices[0].message.content == "Hm."


@case("chat.completions.create(tools=...): reasoning beside calls, n of them")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, f"<think>\nHm.\n</think>\n\n{TWO}")
    completion = client.chat.completions.create(**REQUESTED, tools=[WEATHER], n=2)
    for choice in completion.choices:
        extra = choice.message.model_extra or {}
        assert extra["reasoning_content"] == extra["reasoning"] == "Hm."
        assert len(choice.message.tool_calls or []) == 2


@case("chat.completions.create(tool_choice=...): calls that must be made, as named")
def _(servers: Servers) -> None:
    client = to(servers)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    say(servers.talker.llm, hermes(("weather", {"city": "Bern"})))
    for choice in ("required", named):
        fields = {**REQUESTED, "tools": [WEATHER], "tool_choice": choice}
        first_choice = client.chat.completions.create(**fields).choices[0]
        assert first_choice.finish_reason == "tool_calls"
        (call,) = first_choice.message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Bern"}


@case("tools whose arguments cannot be made to fit are refused by name")
def _(servers: Servers) -> None:
    client = to(servers)
    odd: Any = {"name": "f", "parameters": {"not": {}}, "strict": True}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **REQUESTED, tools=[{"type": "function", "function": odd}]
        )
    assert caught.value.param == "tools[0].function.parameters"


FUNCTION: Final[Any] = {"type": "function", **WEATHER["function"], "strict": False}
INPUT: Final[dict[str, Any]] = {
    "model": "tiny",
    "temperature": 0,
    "input": "What is the weather?",
    "tools": [FUNCTION],
}


@case("responses.create(tools=...): calls, and an answer to their outputs")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, f"<think>Hm.</think>I look.\n{TWO}")
    first = client.responses.create(**INPUT)
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    calls: list[Any] = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == CITIES
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        for call in calls
    ]
    question = {"role": "user", "content": INPUT["input"]}
    say(servers.talker.llm, "It rains.")
    request: Any = {**INPUT, "input": [question, *first.output, *outputs]}
    assert client.responses.create(**request).output_text == "It rains."


@case("responses.stream(tools=...): the same response")
def _(servers: Servers) -> None:
    client = to(servers)
    say(servers.talker.llm, f"I look.\n{TWO}")
    with client.responses.stream(**INPUT) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert last.output_text == "I look."
    calls: list[Any] = [item for item in last.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == CITIES
    assert [tool.type for tool in last.tools] == ["function"]
