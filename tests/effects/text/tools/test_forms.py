"""What grammars of calls let through, with markers as text and as tokens."""

import json
from functools import cache
from typing import Any, Final

import pytest
from attrs import evolve
from tokenizers import AddedToken, Tokenizer

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import json_rule
from minfer.effects.text.grammars.lark_terminals import TextGrammar
from minfer.effects.text.grammars.llguidance_compiler import LlguidanceCompiler
from minfer.effects.text.grammars.schemas import check_schema
from minfer.effects.text.tools import forms, harmony
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.forms import (
    MARKED,
    OBJECT,
    Calling,
    arguments_schema,
    grammar,
)
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.text_arguments import TextArgument
from minfer.effects.text.tools.thinking import BRACKETS, THINK
from minfer.sampling.structured import StructuredOutputs
from tests.effects.text.grammars.bundled import ENDS, allowed, tokenizer
from tests.effects.text.tools.cuts import found
from tests.effects.text.tools.test_deepseek import call as called
from tests.effects.text.tools.test_deepseek import calls
from tests.effects.text.tools.test_qwen_coder import call as tagged

ADD: Final = Callee(
    "add",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n", "description": "x ::= y"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        }
    ),
)
NOW: Final = Callee("now", arguments_schema(None, ""))
SPECIAL: Final = (
    *("[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[THINK]", "[/THINK]"),
    *harmony.MARKERS,
)
ADDED: Final = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    *TOOLS["deepseek_v3"].markers,
)


class Vocabulary:
    """The bundled model's tokens; with `marked`, markers are tokens of their own: those
    given, or those of the formats here.
    """

    def __init__(self, *, marked: bool, markers: tuple[str, ...] = ()) -> None:
        json_form = tokenizer().as_json()
        self.tokens = Tokenizer.from_str(json_form if marked else _unmarked(json_form))
        self.added: dict[str, int] = {}
        if marked:
            self.tokens.add_special_tokens([AddedToken(marker) for marker in SPECIAL])
            added = [*ADDED, *markers]
            self.tokens.add_tokens(
                [AddedToken(marker, special=False) for marker in added]
            )
            for marker in markers or (*SPECIAL, *ADDED):
                token = self.tokens.token_to_id(marker)
                assert token is not None
                self.added[marker] = token
        size = self.tokens.get_vocab_size()
        self.compiler = LlguidanceCompiler(self.tokens.to_str(), size, ENDS)

    def takes(self, text: str, calling: Calling) -> bool:
        """Whether an answer may be this text."""
        constraint = StructuredOutputs(
            grammar=grammar(evolve(calling, token=self.added.get))
        )
        walk = self.compiler.compile(constraint).matcher()
        for token in self.tokens.encode(text, add_special_tokens=False).ids:
            if token not in allowed(walk.mask()):
                return False
            walk.advance([token])
        return walk.may_end


def _unmarked(written: str) -> str:
    """A tokenizer's JSON in which the markers are no tokens: others have their ids."""
    for marker in ADDED:
        written = written.replace(
            json.dumps(marker), json.dumps(f"<|no {marker[1:-1]}|>")
        )
    return written


@cache
def vocabulary(*, marked: bool, markers: tuple[str, ...] = ()) -> Vocabulary:
    return Vocabulary(marked=marked, markers=markers)


def calling(form: str, *, must: bool = True, **settings: Any) -> Calling:
    shown: dict[str, Any] = {"callees": (ADD, NOW), "token": lambda _: None, **settings}
    return Calling(format=form, must=must, **shown)


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments})


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call_json}\n</tool_call>" for call_json in calls)


def deep(form: str, *named_calls: tuple[str, str]) -> str:
    return calls(form, *(called(form, name, emitted) for name, emitted in named_calls))


def message(name: str, arguments: str) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + arguments


ONE: Final = call("add", {"a": 1})
TWO: Final = call("now", {})
BAD: Final = call("add", {"a": "x"})
STRANGE: Final = call("sub", {"a": 1})
LLAMA: Final = [call("add", {"a": 1}, "parameters"), call("now", {}, "parameters")]
HARMONY: Final = (
    message("add", '{"a": 1}'),
    message("add", '{"a": 1}')
    + "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
    + "{}<|call|>",
    message("add", '{"a": "x"}'),
)
DEEP: Final = (("add", '{"a": 1}'), ("now", "{}"), ("add", '{"a": "x"}'))
# By format: an answer with one call, one with two, and one whose arguments do not fit.
ANSWERS: Final = {
    "hermes": (hermes(ONE), hermes(ONE, TWO), hermes(BAD)),
    "llama3_json": (LLAMA[0], "; ".join(LLAMA), call("add", {"a": "x"}, "parameters")),
    "mistral": (
        f"[TOOL_CALLS] [{ONE}]",
        f"[TOOL_CALLS] [{ONE}, {TWO}]",
        f"[TOOL_CALLS] [{BAD}]",
    ),
    "openai": HARMONY,
    "json": (ONE, f"[{ONE}, {TWO}]", BAD),
    "qwen3_coder": (
        tagged("add", ("a", "1")),
        tagged("add", ("a", "1")) + "\n" + tagged("now"),
        tagged("add", ("a", "x")),
    ),
    **{
        form: (deep(form, *DEEP[:1]), deep(form, *DEEP[:2]), deep(form, *DEEP[2:]))
        for form in ("deepseek_v3", "deepseek_v31")
    },
}
NAMED: Final = (
    '[TOOL_CALLS]add[ARGS]{"a": 1}',
    '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
    '[TOOL_CALLS]add[ARGS]{"a": "x"}',
)
both = pytest.mark.parametrize("marked", [False, True])
each = pytest.mark.parametrize("form", sorted(ANSWERS))


def answers(form: str, *, marked: bool) -> tuple[str, str, str]:
    return NAMED if marked and form == "mistral" else ANSWERS[form]


@pytest.mark.long
@both
@each
def test_calls_that_must_be_made_are_made_and_fit(form: str, marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    one_call, two, bad = answers(form, marked=marked)
    assert takes(one_call, calling(form))
    assert takes(two, calling(form))
    assert takes(one_call, calling(form, several=False))
    assert not takes(two, calling(form, several=False))
    for wrong in (
        bad,
        one_call.replace("add", "sub"),
        "Well. " + one_call,
        one_call + " x",
        "",
        "Hi.",
    ):
        assert not takes(wrong, calling(form))


@pytest.mark.long
@each
@both
def test_what_must_be_written_is_read(form: str, marked: bool) -> None:
    one_call, two, _ = answers(form, marked=marked)
    assert found(one_call, form).parsed == [("add", {"a": 1})]
    assert found(two, form).parsed == [("add", {"a": 1}), ("now", {})]


@pytest.mark.long
@both
@each
def test_calls_that_may_be_made_fit_and_text_is_free(form: str, marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    one_call, two, bad = answers(form, marked=marked)
    free = calling(form, must=False)
    for right in (one_call, two, "", "Hi.\n\n{1: 2}", " Well, <tool"):
        assert takes(right, free)
    assert not takes(bad, free)
    assert not takes(one_call.replace("add", "sub"), free)
    if TOOLS[form].markers and form not in ("llama3_json", "openai"):
        assert takes(f"I look.\n{two}", free)
        assert not takes(f"I look.\n{bad}", free)


@both
def test_a_tag_begins_no_text(marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    assert not takes(f"Hi.<|python_tag|>{ONE}", calling("llama3_json", must=False))


@pytest.mark.long
@both
@pytest.mark.parametrize("form", sorted(MARKED.intersection(ANSWERS)))
def test_an_answer_without_calls_may_have_a_schema(form: str, marked: bool) -> None:
    takes = vocabulary(marked=marked).takes
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "name": {"type": "string"}},
        "additionalProperties": False,
    }
    rule = json_rule(json.dumps(schema))
    bound = calling(form, must=False, answer=rule)
    one_call, two, bad = answers(form, marked=marked)
    head = "<|channel|>final<|message|>" if form == "openai" else ""
    for right in (one_call, two, head + '{"ok": true}', head + '{"name": "now"}'):
        assert takes(right, bound)
    for wrong in (
        head + "Hi.",
        bad,
        head + '{"ok": 1}',
        head + '{"ok": true}' + one_call,
    ):
        assert not takes(wrong, bound)


@pytest.mark.long
@both
@pytest.mark.parametrize("form", sorted({*ANSWERS} - {"openai"}))  # with a channel for it
@pytest.mark.parametrize("thinking", [THINK, BRACKETS])
def test_reasoning_comes_before(form: str, marked: bool, thinking: Any) -> None:
    takes = vocabulary(marked=marked).takes
    one_call, _, bad = answers(form, marked=marked)
    thought = f"\nHm: {{.\n{thinking.closes}"
    for must in (True, False):
        for opened in (True, False):
            bound = calling(form, must=must, thinking=thinking, opened=opened)
            reasoning = thought if opened else thinking.opens + thought
            assert takes(reasoning + one_call, bound)
            assert takes(f"{reasoning}\n\n{one_call}", bound)
            assert not takes(f"{reasoning}\n\n{bad}", bound)
            assert takes(one_call, bound) is not opened
            assert takes(f"{reasoning}\n\nHi.", bound) is not must


TEXTS: Final = (  # of a grammar: one that it allows, and one that it does not
    (TextGrammar("regex", 'a"(?:\\n|b)+'), 'a"\n\nb', 'a"c'),
    (TextGrammar("lark", 'start: line+\nline: "+" /.*/ "\\n"'), '+a\n+"\\\n', "+a\nb\n"),
)


def called_with(form: str, text: str, *, marked: bool) -> str:
    """A call with this text."""
    if form == "qwen3_coder":
        return tagged("add", ("input", text))
    one_call, _, _ = answers(form, marked=marked)
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return one_call.replace('{"a": 1}', arguments)


@pytest.mark.long
@both
@each
@pytest.mark.parametrize(("text", "right", "wrong"), TEXTS)
def test_a_text_is_of_its_grammar(
    form: str, marked: bool, text: TextGrammar, right: str, wrong: str
) -> None:
    takes = vocabulary(marked=marked).takes
    callee = Callee("add", OBJECT, text=TextArgument("input", text))
    bound = evolve(calling(form, must=marked), callees=(callee, NOW))
    answer = called_with(form, right, marked=marked)
    assert takes(answer, bound)
    assert not takes(called_with(form, wrong, marked=marked), bound)
    assert found(answer, form).parsed == [("add", {"input": right})]


@pytest.mark.long
def test_a_text_of_recursive_rules_is_one_of_json_only() -> None:
    grammar_of_sums = TextGrammar("lark", 'start: "(" start* ")"\n%ignore " "')
    callee = Callee("add", OBJECT, text=TextArgument("input", grammar_of_sums))
    bound = evolve(calling("hermes"), callees=(callee, NOW))
    takes = vocabulary(marked=True).takes
    for text, fits in (("(()())", True), ("( ( ) )", True), ("(()", False), ("", False)):
        assert takes(called_with("hermes", text, marked=True), bound) == fits
    with pytest.raises(GrammarError, match="'start' contains itself"):
        grammar(evolve(bound, format="qwen3_coder"))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("a <parameter=x>", True),
        ("a\n</p>", True),
        ("</parameter>", False),
        ("a\n<parameter=x>", False),
        ("a\n</function>\n</tool_call>", False),
    ],
)
def test_a_text_before_a_tag_does_not_end_within(text: str, fits: bool) -> None:
    """A reader takes the first tag for the end."""
    grammar = TextGrammar("lark", "start: /(?s:.)*/")
    callee = Callee("patch", OBJECT, text=TextArgument("input", grammar))
    bound = evolve(calling("qwen3_coder"), callees=(callee,))
    answer = tagged("patch", ("input", text))
    assert vocabulary(marked=False).takes(answer, bound) == fits
    read = found(answer, "qwen3_coder").parsed
    assert (read == [("patch", {"input": text})]) == fits


def test_any_object_may_be_the_arguments_of_a_tool_that_is_not_strict() -> None:
    loose = evolve(calling("json", must=False), callees=(Callee("add", OBJECT),))
    takes = vocabulary(marked=False).takes
    assert takes(BAD, loose)
    assert not takes(STRANGE, loose)
    assert not takes(call("add", [1]), loose)


def test_the_schema_of_an_agents_tool_is_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def check(text: str, param: str, *, lenient: bool = False) -> str:
        checked.append(text)
        return check_schema(text, param, lenient=lenient)

    monkeypatch.setattr(forms, "check_schema", check)
    parameters = {"properties": {"once": {"enum": [1, 2]}}}
    results = {arguments_schema(parameters, "tools[0].parameters") for _ in range(3)}
    assert (len(results), len(checked)) == (1, 1)
    for _ in range(2):  # an error is not kept
        with pytest.raises(GrammarError, match=r"tools\[1\].parameters"):
            arguments_schema({"properties": {"a": {"if": {}}}}, "tools[1].parameters")


def test_no_arguments_but_those_of_an_object() -> None:
    assert json.loads(arguments_schema({"minProperties": 1}, "x"))["type"] == "object"
    assert json.loads(arguments_schema({"type": ["object", "null"]}, "x")) == {
        "type": "object"
    }
    with pytest.raises(GrammarError, match='must be a schema of the type "object"'):
        arguments_schema({"type": "string"}, "tools[0].parameters")
    with pytest.raises(GrammarError, match="'not' cannot be enforced") as caught:
        arguments_schema(
            {"properties": {"a": {"not": {"const": 1}}}}, "tools[0].parameters"
        )
    assert caught.value.param == "tools[0].parameters"
    assert "(at /properties/a)" in str(caught.value)


def test_a_name_that_no_call_could_have() -> None:
    strange = evolve(calling("hermes"), callees=(Callee("a b", OBJECT),))
    with pytest.raises(GrammarError, match="cannot have the name 'a b'"):
        grammar(strange)
