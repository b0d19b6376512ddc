"""What the prompt left open: reasoning or a call that the answer goes on with, and
constraints, which begin where the answer does.
"""

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from minfer.effects.serving.anthropic.create_message import ENDPOINT as MESSAGES
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.chat_completions import ENDPOINT as CHAT
from minfer.effects.serving.openai.responses import ENDPOINT as RESPONSES
from minfer.effects.serving.protocol import Endpoint, GenerationRequest
from minfer.effects.serving.request_parsing import tool_constraints as calling
from minfer.effects.serving.request_parsing.answer_parsing import (
    AnswerParser,
    ParsedAnswer,
)
from minfer.effects.text.outputs import CompletionOutput
from tests.effects.serving.test_round_trips import HI, Ground, tokenizer
from tests.effects.text.grammars.bundled import allowed, compiler

SAYS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BODYLESS = SAYS + "{% if add_generation_prompt %}<assistant>{% endif %}"
OPENS = SAYS + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
CALL = '{"name": "add", "arguments": {"a": 1}}'
NOW = '<tool_call>{"name": "now"}</tool_call>'


def generation(
    endpoint: Endpoint = CHAT,
    template: str = OPENS,
    form: str = "hermes",
    extra: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> GenerationRequest:
    """What a body asks for that has these fields, and `extra` of them."""
    body = {"input" if endpoint is RESPONSES else "messages": [HI], **fields, **extra}
    ground: Any = Ground(template, form)
    return endpoint.read(json.dumps(body).encode()).generation(ground)


def parsed_text(request: GenerationRequest, text: str, *, stream: bool) -> ParsedAnswer:
    """What is told of an answer that comes character by character."""
    as_sent: Any = SimpleNamespace(parsing=request.parsing, stream=stream)
    parsed = AnswerParser(as_sent)
    ends = ["length" if i == len(text) - 1 else None for i in range(len(text))]
    return ParsedAnswer.of(
        delta
        for char, end in zip(text, ends, strict=True)
        for delta in parsed.read(
            0, CompletionOutput(index=0, text=char, token_ids=[], finish_reason=end)
        )
    )


GOES_ON = [
    ("<think>\n7 + 5 =", " 12\n</think>\nIt is 12.", ParsedAnswer("It is 12.", " 12")),
    ("<think>\n7 + 5 = ", "12", ParsedAnswer("", "12")),
    ("<think>Hm.</think>It is ", "12 </think>", ParsedAnswer("12 </think>")),
    ("It is", " 12.", ParsedAnswer(" 12.")),
    ("I <think>", " so", ParsedAnswer(" so")),
    ("", "12", ParsedAnswer("12")),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("prefix", "text", "parsed"), GOES_ON)
def test_an_answer_goes_on_where_the_prompt_ends(
    prefix: str, text: str, parsed: ParsedAnswer, stream: bool
) -> None:
    messages = [HI, {"role": "assistant", "content": prefix}]
    in_parts = [HI, {"role": "assistant", "content": [{"type": "text", "text": prefix}]}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for request in (
        generation(messages=messages, extra=options),
        generation(messages=in_parts, tools=TOOLS, extra=options),
        generation(MESSAGES, messages=messages, max_tokens=5),
        generation(MESSAGES, messages=in_parts, max_tokens=5),
    ):
        assert parsed_text(request, text, stream=stream) == parsed


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before", ["", "I add. ", NOW, "<think>So.</think>"])
def test_a_call_goes_on_where_the_prompt_ends(before: str, stream: bool) -> None:
    """Unless its arguments are whole there."""
    for i in range(len(CALL) - 1):
        prefix = f"{before}<tool_call>\n{CALL[:i]}"
        request = generation(
            messages=[HI, {"role": "assistant", "content": prefix}],
            tools=TOOLS,
            continue_final_message=True,
        )
        parsed = parsed_text(request, f"{CALL[i:]}\n</tool_call>Done.", stream=stream)
        calls = [(call.name, call.arguments) for call in parsed.calls]
        assert calls == [("add", '{"a": 1}')]
        assert (parsed.content, parsed.reasoning) == ("Done.", "")


def test_what_a_user_says_opens_nothing() -> None:
    request = generation(template=BODYLESS, messages=[{**HI, "content": "x <think>\n"}])
    assert parsed_text(request, "12", stream=True) == ParsedAnswer("12")


# Fields, an answer that they take, and one that they do not.
BOUND: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}', "[1]"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"pattern": '^[^"]$'}},
            }
        },
        '"x"',
        '"\\""',
    ),
    ({"guided_json": {"type": "integer"}}, "12", "x"),
    ({"guided_regex": "[0-9]+/a\n|b\\/"}, "12/a\n", "12/"),
    ({"guided_choice": ["yes", "no\n"]}, "no\n", "no"),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, "((x))", "((x)"),
    ({"guided_grammar": 'root ::= "(" root ")" | "x"'}, "((x))", "((x)"),
    (
        {
            "structured_outputs": {
                "structural_tag": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            }
        },
        "a <f>1</f>",
        "a <f>x</f>",
    ),
]


def takes(request: GenerationRequest, text: str) -> bool:
    constraint = request.params.structured_outputs
    assert constraint is not None
    walk = compiler().compile(constraint).matcher()
    for token in tokenizer().encode(text, add_special_tokens=False):
        if token not in allowed(walk.mask()):
            return False
        walk.advance([token])
    return walk.may_end


@pytest.mark.parametrize(("fields", "right", "wrong"), BOUND)
def test_reasoning_is_free_and_the_answer_behind_it_is_bound(
    fields: dict[str, Any], right: str, wrong: str
) -> None:
    thought = "Hm {[ 5.\n</think>\n\n"
    for all_fields in (fields, {**fields, "tools": TOOLS}):
        request = generation(extra=all_fields)
        assert takes(request, thought + right)
        assert not takes(request, thought + wrong)
        assert not takes(request, "Hm {")
        assert request.constraint_field.startswith(next(iter(fields)))
        parsed = parsed_text(request, thought + right, stream=True)
        assert (parsed.content.strip(), parsed.reasoning) == (right.strip(), "Hm {[ 5.")
        closed = generation(template=BODYLESS, extra=all_fields)
        assert not takes(closed, thought + right) or "structured_outputs" in fields
        assert takes(closed, right)


def test_a_response_is_bound_behind_its_reasoning() -> None:
    request = generation(RESPONSES, text={"format": {"type": "json_object"}})
    assert takes(request, 'Hm.</think>{"a": 1}')
    assert not takes(request, '{"a": 1}')
    assert request.constraint_field == "text.format"


def test_reasoning_that_was_begun_is_free_to_its_end() -> None:
    options = {"continue_final_message": True, "guided_choice": ["12"]}
    open_, closed = (
        generation(messages=[HI, {"role": "assistant", "content": prefix}], extra=options)
        for prefix in ("<think>\n7 + 5 =", "<think>\n7 + 5 = 12</think>\n")
    )
    assert takes(open_, " 12\n</think>\n12")
    assert not takes(open_, "12")
    assert takes(closed, "12")


def test_what_says_itself_where_reasoning_ends_is_taken_as_it_is() -> None:
    request = generation(guided_grammar='start: /[a-z]+/ "X" // </think>')
    assert takes(request, "hmX")


def test_errors_name_the_field_that_was_sent() -> None:
    strict = {"name": "a", "schema": {"if": {}}, "strict": True}
    schema = {"type": "json_schema", "json_schema": strict}
    for fields, param in (
        ({"response_format": schema}, "response_format.json_schema.schema"),
        ({"guided_regex": "a\\"}, "guided_regex"),
    ):
        with pytest.raises(ApiError) as caught:
            generation(extra=fields)
        assert caught.value.param == param
        assert str(caught.value).startswith(f"{param}: ")


def test_reasoning_of_no_known_format_is_bound_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calling._warn_unknown_reasoning.cache_clear()
    for marker in ("<seed:think>", "<|start_reasoning|>", "[Thought]"):
        template = OPENS.replace("<think>", marker)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                request = generation(template=template, form="", guided_choice=["yes"])
                assert takes(request, "yes")
        assert [marker in message for message in caplog.messages] == [True]
        caplog.clear()
    generation(template=BODYLESS, form="", guided_choice=["yes"])
    assert caplog.messages == []
