"""LangChain's ChatOpenAI and OpenAI, pointed at a server."""

import asyncio
from typing import Any, Final

import pytest

from tests.effects.scripted import hermes, say
from tests.effects.serving.sdk.cases import Table
from tests.effects.serving.sdk.servers import Servers

TABLE: Final = Table("langchain-openai", ("langchain_openai", "langchain_core"))
case: Final = TABLE
REQUESTED: Final = "Write a Python function is_prime."


def to(servers: Servers, **overrides: Any) -> Any:
    """A chat model that is the bundled one."""
    from langchain_openai import ChatOpenAI

    settings = {"model": "bundled", "temperature": 0, "max_retries": 0, "api_key": "-"}
    url = f"{servers.bundled.url}/v1"
    limit = {"max_completion_tokens": 8, "base_url": url}
    return ChatOpenAI(**{**settings, **limit, **overrides})


@case("ChatOpenAI.invoke: a message with usage")
def _(servers: Servers) -> None:
    message = to(servers).invoke(REQUESTED)
    assert message.content
    assert message.usage_metadata["output_tokens"] == 8
    assert message.response_metadata["finish_reason"] == "length"


@case("ChatOpenAI.stream: parts of what comes whole")
def _(servers: Servers) -> None:
    model = to(servers)
    texts = [message_part.content for message_part in model.stream(REQUESTED)]
    assert "".join(texts) == model.invoke(REQUESTED).content


@case("ChatOpenAI.batch: answers in order")
def _(servers: Servers) -> None:
    model = to(servers)
    prompts = [REQUESTED, "Write a Python function fibonacci.", REQUESTED]
    first, second, third = (message.content for message in model.batch(prompts))
    assert first == third != second


@case("ChatOpenAI.ainvoke, astream: in an event loop")
def _(servers: Servers) -> None:
    model = to(servers)

    async def both() -> tuple[str, str]:
        texts = [message_part.content async for message_part in model.astream(REQUESTED)]
        return str((await model.ainvoke(REQUESTED)).content), "".join(texts)

    whole_text, streamed = asyncio.run(both())
    assert whole_text == streamed


@case("a chain: a template with a system and turns, a model, a parser; stop")
def _(servers: Servers) -> None:
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    turns = [
        ("system", "You write Python."),
        ("human", "Hello!"),
        ("ai", "Hello! How can I help you?"),
        ("human", "Write a Python function {what}."),
    ]
    model = to(servers).bind(stop=["("])
    chain = ChatPromptTemplate.from_messages(turns) | model | StrOutputParser()
    text = chain.invoke({"what": "is_prime"})
    assert text
    assert "(" not in text


@case("OpenAI.invoke, stream: completions")
def _(servers: Servers) -> None:
    from langchain_openai import OpenAI

    url = f"{servers.bundled.url}/v1"
    limit: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "max_retries": 0}
    model = OpenAI(base_url=url, api_key="-", model="bundled", **limit)
    assert model.invoke("import os\n") == "".join(model.stream("import os\n"))


@case("an error is OpenAI's, as LangChain passes it on")
def _(servers: Servers) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        to(servers, model="gpt-9").invoke(REQUESTED)


def talking(servers: Servers, text: str, **options: Any) -> Any:
    """A chat model with a tool, whose answers are a text."""
    add = {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    say(servers.talker.llm, text)
    url = f"{servers.talker.url}/v1"
    limit = {"max_completion_tokens": 400}
    return to(servers, model="tiny", base_url=url, **limit).bind_tools([add], **options)


ADDED: Final = hermes(("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4}))
WANTED: Final = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


@case("ChatOpenAI.bind_tools: calls, and messages with what tools say")
def _(servers: Servers) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = talking(servers, f"I add.\n{ADDED}")
    message = model.invoke("Add.")
    assert message.content == "I add."
    assert [call["args"] for call in message.tool_calls] == WANTED
    assert not message.invalid_tool_calls
    answers = [ToolMessage("3", tool_call_id=call["id"]) for call in message.tool_calls]
    say(servers.talker.llm, "3 and 3.")
    assert model.invoke([HumanMessage("Add."), message, *answers]).content == "3 and 3."


@case("ChatOpenAI.bind_tools, stream: fragments that add up")
def _(servers: Servers) -> None:
    message_parts = list(talking(servers, ADDED).stream("Add."))
    message = message_parts[0]
    for message_part in message_parts[1:]:
        message += message_part
    assert [call["args"] for call in message.tool_calls] == WANTED
    assert len({call["id"] for call in message.tool_calls}) == 2
    assert message.response_metadata["finish_reason"] == "tool_calls"


@case("ChatOpenAI.bind_tools(tool_choice=...): any, a name; strict")
def _(servers: Servers) -> None:
    call_text = hermes(("add", {"a": 1}))
    for options in ({"tool_choice": "any"}, {"tool_choice": "add"}, {"strict": True}):
        message = talking(servers, call_text, **options).invoke("Add.")
        assert [call["args"] for call in message.tool_calls] == [{"a": 1}]


@case("ChatOpenAI.with_structured_output: by a call")
def _(servers: Servers) -> None:
    from pydantic import BaseModel

    class Sum(BaseModel):
        """A sum."""

        total: int

    say(servers.talker.llm, hermes(("Sum", {"total": 5})))
    model = to(servers, model="tiny", base_url=f"{servers.talker.url}/v1")
    model.max_tokens = 400
    reads = model.with_structured_output(Sum, method="function_calling")
    assert reads.invoke("Add.") == Sum(total=5)
