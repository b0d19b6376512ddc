"""The grammar of required calls, of every format: it takes what the format writes."""

import json
from typing import Any, Final

import pytest
from attrs import evolve

from minfer.effects.text.grammars.lark_terminals import TextGrammar
from minfer.effects.text.tools.argument_forms import Callee
from minfer.effects.text.tools.formats import Parsing
from minfer.effects.text.tools.forms import OBJECT, Calling
from minfer.effects.text.tools.python_calls import PythonCalls
from minfer.effects.text.tools.table import TOOLS
from minfer.effects.text.tools.text_arguments import TextArgument
from minfer.effects.text.tools.thinking import THINK
from tests.circles import claimed, long
from tests.effects.text.tools.cuts import fed, reported
from tests.effects.text.tools.samples import WRITTEN, written_answer
from tests.effects.text.tools.test_forms import vocabulary

ARGUMENTS: Final[dict[str, Any]] = {
    "city": 'Zürich "x"',
    "kind": "b c",
    "days": 3,
    "sure": True,
    "where": {"at": [1, 2]},
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "kind": {"enum": ["a", "b c"]},
        "days": {"type": "integer", "minimum": 1},
        "sure": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "integer"}}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE: Final = {"type": "object", "properties": {}, "additionalProperties": False}
CALLEES: Final = (
    Callee("weather", json.dumps(SCHEMA)),
    Callee("now", json.dumps(NONE)),
    Callee("any", '{"type": "object"}'),
)
ONE: Final = ("weather", ARGUMENTS)
FEW: Final = ("weather", {"city": "", "days": 12})
BAD: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("weather", {**ARGUMENTS, "days": 0}),
    ("weather", {**ARGUMENTS, "kind": "c"}),
    ("weather", {"city": "x"}),
    ("weather", {"days": 1}),
    ("weather", {"city": "x", "days": 1, "strange": 2}),
    ("other", {}),
)
# One format of each notation, with a group of calls and without.
KINDS: Final = (
    *("hermes", "cohere_command", "llama3_json", "kimi_k2", "functionary_v32"),
    *("glm47", "deepseek_v32", "lfm2", "gemma4"),
)
OTHERS: Final = [name for name in WRITTEN if name not in KINDS]
each = pytest.mark.parametrize("name", [*long(KINDS), *claimed(OTHERS)])


def calling(name: str, *, must: bool = True, **settings: Any) -> Calling:
    shown: dict[str, Any] = {"callees": CALLEES, "token": lambda _: None, **settings}
    return Calling(format=name, must=must, **shown)


def double(value: Any) -> str:
    """A value as Python has it, texts in double quotes."""
    if isinstance(value, bool | None):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def written(name: str, *calls: tuple[str, dict[str, Any]], marked: bool) -> str:
    form = TOOLS[name]
    if isinstance(form.dialect, PythonCalls):  # texts are in JSON's quotes
        shown = written_answer(form, [(f, {}) for f, _ in calls])
        for call, arguments in calls:
            values = (f"{k}={double(v)}" for k, v in arguments.items())
            shown = shown.replace(f"{call}()", f"{call}({', '.join(values)})", 1)
        return shown
    if form.older is not None and not marked:
        older = evolve(form, written=form.older[1], older=None)
        return written_answer(older, calls)
    return written_answer(form, calls)


@pytest.mark.parametrize("marked", [False, True])
@each
def test_required_calls_are_in_the_form_of_the_format(name: str, marked: bool) -> None:
    words = vocabulary(marked=marked, markers=TOOLS[name].markers if marked else ())
    takes = words.takes
    form = TOOLS[name]
    parallel = form.written is not None and form.written.between is not None
    assert takes(written(name, ONE, marked=marked), calling(name))
    assert (
        takes(written(name, FEW, ("now", {}), marked=marked), calling(name)) is parallel
    )
    assert takes(written(name, ("any", {"a": "x"}), marked=marked), calling(name))
    lone = calling(name, several=False)
    assert takes(written(name, FEW, marked=marked), lone) is not (
        form.written is not None and form.written.lone
    )
    assert not takes(written(name, FEW, FEW, marked=marked), lone)
    for bad in BAD:
        assert not takes(written(name, bad, marked=marked), calling(name)), bad
    assert not takes("Well.", calling(name))


@each
def test_calls_are_allowed_in_text(name: str) -> None:
    takes = vocabulary(marked=False).takes
    free = calling(name, must=False, thinking=THINK)
    tool_form = written(name, FEW, marked=False)
    assert takes(tool_form, free)
    assert takes(f"<think>Hm.</think>{tool_form}", free)
    form = TOOLS[name].written
    assert form is not None
    assert takes(f"{form.content}Hi.\n\n1, 2", free)
    if TOOLS[name].begins_with_marker:
        assert takes(f"I look.\n{tool_form}", free)
        bad = written(name, BAD[0], marked=False)
        assert not takes(f"I look.\n{bad}", free)


TEXTS: Final = (  # of a grammar: one that it allows, and one that it does not
    (TextGrammar("regex", 'a"(?:\\n|b)+'), 'a"\n\nb', 'a"c'),
    (TextGrammar("lark", 'start: line+\nline: "+" /.*/ "\\n"'), '+a\n+"\\\n', "+a\nb\n"),
)


@pytest.mark.parametrize("marked", [False, True])
@each
@pytest.mark.parametrize(("text", "right", "wrong"), TEXTS)
def test_the_text_of_a_custom_tool_is_of_its_grammar(
    name: str, marked: bool, text: TextGrammar, right: str, wrong: str
) -> None:
    words = vocabulary(marked=marked, markers=TOOLS[name].markers if marked else ())
    callee = Callee("weather", OBJECT, text=TextArgument("input", text))
    bound = evolve(calling(name), callees=(callee,))
    answer = written(name, ("weather", {"input": right}), marked=marked)
    assert words.takes(answer, bound)
    bad = written(name, ("weather", {"input": wrong}), marked=marked)
    assert not words.takes(bad, bound)
    read = fed(Parsing(tools=name, names=("weather",)).parser(), [answer])
    assert reported(read).parsed == [("weather", {"input": right})]
