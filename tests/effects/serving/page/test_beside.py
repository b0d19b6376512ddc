"""What an answer has besides its text: thoughts, folded above it, and calls of tools."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from minfer.effects.text.tools.formats import Parsers
from tests.effects.browser import Browser
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import (
    DRY,
    go,
    overhear,
    seen,
    settled,
    spoken,
    text,
    visit,
    write,
)

pytestmark = seen

# What a server sends whose model thinks, and calls a tool.
TOLD: list[dict[str, Any]] = [
    {"reasoning_content": "Hm, <b>"},
    {"reasoning_content": " so."},
    {"content": "It *is*"},
    {"content": " so."},
    {"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
    {"tool_calls": [{"index": 1, "function": {"name": "now", "arguments": "{}"}}]},
]


@pytest.fixture
def page(chromium: Browser, dry: Serving) -> Iterator[Browser]:
    """The page, which must not complain."""
    visit(chromium, dry)
    yield chromium
    assert chromium.complaints == []


def told(page: Browser, *deltas: dict[str, Any]) -> None:
    """Have the page be told this in answer to what it asks next, and wait at its end."""
    events = [json.dumps({"choices": [{"index": 0, "delta": one}]}) for one in deltas]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    page.value(
        "window.fetch = async () => new Response(new ReadableStream({ start(to) {"
        " const say = (one) => to.enqueue(new TextEncoder().encode("
        "`data: ${one}\\n\\n`));"
        f" {json.dumps(events)}.forEach(say);"
        " window.over = () => {"
        f" say({json.dumps(json.dumps(end))}); say('[DONE]'); to.close(); }}; }} }})); 0"
    )


def test_what_is_thought_is_folded_above_the_answer(page: Browser) -> None:
    told(page, *TOLD[:2])
    write(page, "Hello?")
    page.wait("document.querySelector('.thought:not([hidden])')")
    assert text(page, ".assistant > .thought > summary") == ["Thinking"]
    assert text(page, ".assistant .dots") == []
    assert not page.value("document.querySelector('.thought').open")
    page.value("over()")
    settled(page)
    assert text(page, ".thought > summary")[0].startswith("Thought")
    assert text(page, ".thoughts") == ["Hm, <b> so."]
    assert text(page, ".assistant > .text") == [""]
    assert "Try again" in text(page, ".words:not([hidden])")


def test_an_answer_behind_thoughts_and_calls(page: Browser, dry: Serving) -> None:
    told(page, *TOLD)
    write(page, "Hello?")
    page.wait("document.querySelectorAll('.call').length === 2")
    page.value("over()")
    settled(page)
    assert text(page, ".thought > summary")[0].startswith("Thought")
    assert text(page, ".assistant > .text") == ["It is so."]
    assert text(page, ".call > summary") == ["Calls add", "Calls now"]
    assert text(page, ".call > pre") == ['{"a": 1}', "{}"]
    order = "[...document.querySelector('.assistant').children].map((o) => o.className)"
    assert page.value(order)[:3] == ["thought", "text", "calls"]
    page.value("document.querySelector('.thought > summary').click()")
    assert page.value("document.querySelector('.thought').open")
    go(page, dry.url)  # all of it is kept
    assert text(page, ".thoughts") == ["Hm, <b> so."]
    assert len(text(page, ".call")) == 2
    # What was thought is not sent again.
    overhear(page)
    write(page, "And?")
    settled(page, 2)
    said = json.loads(page.value("asked[0]"))["messages"][1]
    assert said == {"role": "assistant", "content": "It *is* so."}


def test_a_model_that_thinks(chromium: Browser) -> None:
    with serving(names=("bundled",), **DRY) as served:
        tokenizer = served.llm.tokenizer
        assert tokenizer is not None
        assert tokenizer.chat_template is not None
        tokenizer.chat_template += "<think>"
        served.llm.read_answers(Parsers(reasoning="think"))
        visit(chromium, served)
        write(chromium, "Hello?")
        settled(chromium)
        (thought,) = text(chromium, ".thoughts")
        assert "start again with a model." in thought
        assert text(chromium, ".about")[0].startswith(f"{spoken(served)} tokens")
        assert chromium.complaints == []
