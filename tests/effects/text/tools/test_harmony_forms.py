"""What a grammar of Harmony's messages lets through, and that all of it is read."""

import json
from typing import Any

import pytest
from attrs import evolve

from minfer.effects.text.grammars.grammar_text import json_rule
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.effects.text.tools.forms import grammar
from minfer.effects.text.tools.harmony_forms import CALL
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.bundled import ENDS, allowed
from tests.effects.text.tools.cuts import found
from tests.effects.text.tools.test_forms import both, calling, message, vocabulary

BETWEEN = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm: {{x}}.\n<|end|>{BETWEEN}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.<|end|>{BETWEEN}"
FINAL = "<|channel|>final<|message|>It rains."
ADD = message("add", '{"a": 1}')
BEFORE = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
BAD = message("add", '{"a": "x"}')
OTHER = message("sub", '{"a": 1}')
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "additionalProperties": False,
}
RULE = json_rule(json.dumps(OBJECT))


@pytest.mark.long
@both
@pytest.mark.parametrize(
    "text",
    [ADD, BEFORE, ADD + CALL, THOUGHT + ADD, THOUGHT + THOUGHT + BEFORE + CALL],
)
def test_a_call_that_must_be_made_comes_only_behind_reasoning(
    text: str, marked: bool
) -> None:
    takes = vocabulary(marked=marked).takes
    for parallel in (True, False):
        must = calling("openai", several=parallel)
        assert takes(text, must)
        assert takes(text + CALL * (CALL not in text) + BETWEEN + ADD, must) is parallel
    parsed = found(text, "openai")
    assert parsed.parsed == [("add", {"a": 1})]
    assert parsed.content == ""
    assert ("Hm" in parsed.reasoning) == (THOUGHT in text)


@both
@pytest.mark.parametrize(
    "text",
    [
        *("", "Hi.", THOUGHT, THOUGHT + FINAL, PREAMBLE + ADD),
        *(BAD, THOUGHT + BAD, OTHER),
        *(ADD + " x", ADD + "<|end|>", ADD + FINAL),
        ADD.replace("commentary", "final"),
    ],
)
def test_nothing_else_does_where_it_must_be_made(text: str, marked: bool) -> None:
    assert not vocabulary(marked=marked).takes(text, calling("openai"))


@both
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (FINAL, "It rains.", 0),
        (THOUGHT + PREAMBLE + ADD + CALL, "I look.", 1),
        (THOUGHT + FINAL + "<|return|>", "It rains.", 0),
        (PREAMBLE + THOUGHT + FINAL + "<|end|>", "I look.\n\nIt rains.", 0),
        ("Hi {1} to=functions.add", "Hi {1} to=functions.add", 0),
        (THOUGHT + BEFORE, "", 1),
    ],
)
def test_where_calls_may_be_made_messages_are_free(
    text: str, content: str, calls: int, marked: bool
) -> None:
    assert vocabulary(marked=marked).takes(text, calling("openai", must=False))
    parsed = found(text, "openai")
    assert (parsed.content, len(parsed.calls)) == (content, calls)


@both
@pytest.mark.parametrize("before", ["", THOUGHT, PREAMBLE, FINAL])
@pytest.mark.parametrize("call", [BAD, OTHER, BEFORE.replace("1", "1.5")])
def test_no_call_may_come_that_does_not_fit(before: str, call: str, marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    free = calling("openai", must=False)
    assert not takes(before + call, free)
    assert not takes(f"{before}<|end|>{BETWEEN}{call}", free)


@both
@pytest.mark.parametrize(
    "header", [" to=", " to=me", "<|constrain|>", "<|constrain|>json"]
)
def test_text_without_a_header_does_not_begin_as_one(header: str, marked: bool) -> None:
    """Else it would be a call that nothing was asked of."""
    text = f'{header} to=functions.add<|message|>{{"a": "x"}}'
    assert found(text, "openai").calls == [("add", '{"a": "x"}')]
    assert not vocabulary(marked=marked).takes(text, calling("openai", must=False))


@pytest.mark.long
@both
def test_an_answer_with_a_schema_is_a_final_message(marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    bound = calling("openai", must=False, answer=RULE)
    right = '{"ok": true}'
    for header in ("<|message|>", " <|constrain|>json<|message|>"):
        final = f"<|channel|>final{header}"
        assert takes(final + right, bound)
        assert takes(THOUGHT + final + right + "<|return|>", bound)
        assert not takes(final + '{"ok": 1}', bound)
    assert not takes(right, bound)
    assert not takes(PREAMBLE + "<|channel|>final<|message|>" + right, bound)
    parsed = found(
        THOUGHT + "<|channel|>final <|constrain|>json<|message|>" + right, "openai"
    )
    assert parsed.content == right


def test_a_call_may_end_the_sequence() -> None:
    """As it does with gpt-oss, whatever else might follow."""
    words = vocabulary(marked=True)
    end = words.added[CALL]
    size = words.tokens.get_vocab_size()
    compiler = LlguidanceCompiler(words.tokens.to_str(), size, [*ENDS, end])
    requested: Any = calling("openai", token=words.added.get)
    for parallel in (True, False):
        text = grammar(evolve(requested, several=parallel))
        walk = compiler.compile(StructuredOutputs(grammar=text)).matcher()
        for token in words.tokens.encode(THOUGHT + ADD, add_special_tokens=False).ids:
            assert not walk.may_end
            assert token in allowed(walk.mask())
            walk.advance([token])
        assert end in allowed(walk.mask())
        assert walk.may_end
