"""`thinking` and `output_config` become the chat template's variables."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from minfer.effects.live.async_llm import AsyncLLM
from minfer.effects.serving.request_parsing.ignored_hints import collect_ignored
from minfer.effects.text.tools.formats import Parsers
from tests.effects.scripted import write_talker
from tests.effects.serving.anthropic.helpers import body, refused

THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% endif %}{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FORM = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = write_talker(tmp_path_factory.mktemp("talker"), THINKS)
    with contextlib.closing(AsyncLLM(path, executor="dry")) as llm:
        llm.set_parsers(Parsers("hermes", "think"))
        yield llm


def prompt(llm: AsyncLLM, **fields: Any) -> tuple[str, tuple[str, ...]]:
    """A body's prompt behind its one message, and the fields that change nothing."""
    with collect_ignored() as hints:
        ids = body(**fields).generation(llm).prompts[0].ids
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    return text.removeprefix("[user]hi"), hints.names


ENABLED = {"type": "enabled", "budget_tokens": 2048}


@pytest.mark.parametrize(
    ("fields", "end", "ignored"),
    [
        ({}, "", ()),
        ({"thinking": {"type": "adaptive"}}, "", ()),
        ({"thinking": {"type": "disabled"}}, "<think></think>", ()),
        ({"thinking": ENABLED}, "(medium)", ("thinking.budget_tokens",)),
        ({"output_config": {"effort": "max"}}, "(max)", ()),
        (
            {"thinking": ENABLED, "output_config": {"effort": "low"}},
            "(low)",
            ("thinking.budget_tokens",),
        ),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            "",
            ("thinking.display",),
        ),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "", ()),
    ],
)
def test_the_template_is_switched(
    llm: AsyncLLM, fields: dict[str, Any], end: str, ignored: tuple[str, ...]
) -> None:
    assert prompt(llm, **fields) == (end, ignored)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"thinking": {"type": "disabled"}}, ("thinking",)),
        ({"thinking": {"type": "adaptive"}}, ("thinking",)),
        ({"output_config": {"effort": "high"}}, ("output_config.effort",)),
        ({"output_config": {}}, ()),
    ],
)
def test_without_a_switch_the_field_is_named(
    llm: AsyncLLM,
    fields: dict[str, Any],
    ignored: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", PLAIN)
    assert prompt(llm, **fields) == ("", ignored)


def test_a_model_that_does_not_think_is_not_to_be_stopped(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", PLAIN)
    monkeypatch.setattr(llm, "parsers", Parsers("hermes", "none"))
    assert prompt(llm, thinking={"type": "disabled"}) == ("", ())


def test_a_system_message_may_change_the_effort(llm: AsyncLLM) -> None:
    later = {"role": "system", "content": "x", "output_config": {"effort": "low"}}
    messages = [{"role": "user", "content": "hi"}, later]
    text, _ = prompt(llm, messages=messages, output_config={"effort": "high"})
    assert text.endswith("(low)")


def test_a_format_constrains_the_answer(llm: AsyncLLM) -> None:
    params = body(output_config={"format": FORM}).generation(llm).params
    assert params.structured_outputs is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": 5}, "thinking"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "budget_tokens": "9"}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "type": "adaptive"}}, "thinking.budget_tokens"),
        ({"thinking": {**ENABLED, "display": "x"}}, "thinking.display"),
        ({"thinking": {**ENABLED, "colour": "x"}}, "thinking.colour"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"output_config": {"format": 5}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {**FORM, "schema": 5}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"format": {**FORM, "x": 5}}}, "output_config.format.x"),
    ],
)
def test_what_makes_no_sense(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param
