"""Grammars of answers with tool calls, for calls that are required or strict.

    must         thought? call+                  the answer is calls, and nothing else
    otherwise    thought? (text call)* text      a marker begins a call, which is complete
                 thought? (call+ | text)         of formats without markers
                 thought? (call+ | JSON)         with markers, of answers with a schema

Harmony's, whose answers are messages, are in `harmony_forms.py`.

A call has the form that the model was trained on (`CallForm`), but its arguments match
their schema (`argument_forms`).
Markers that are tokens of their own are matched as tokens: the model was not trained on
their text in other tokens, and grammars distinguish the two. Free text has no such
tokens.
"""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from attrs import evolve, frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import TEXT
from minfer.effects.text.grammars.schemas import check_schema
from minfer.effects.text.tools.argument_forms import Callee, argument_form
from minfer.effects.text.tools.calls import is_tool_name
from minfer.effects.text.tools.format import CallForm, ToolFormat
from minfer.effects.text.tools.harmony_forms import HarmonyRules
from minfer.effects.text.tools.marker_rules import MarkerRules, as_regex
from minfer.effects.text.tools.table import HARMONY, TOOLS
from minfer.effects.text.tools.thinking import Thinking

OBJECT: Final = '{"type": "object"}'
_NO_ARGUMENTS: Final = (
    '{"type": "object", "properties": {}, "additionalProperties": false}'
)
_MAX_CACHED_SCHEMAS: Final = 128
_GAP: Final = r"GAP: /\n{0,2}/"  # before calls
FORMS: Final = frozenset(
    name for name, form in TOOLS.items() if form.written is not None or name == HARMONY
)
# Formats with markers, which distinguish calls from answers in JSON.
MARKED: Final = frozenset(
    name for name in FORMS if name == HARMONY or TOOLS[name].begins_with_marker
)


@frozen(kw_only=True)
class Calling:
    """The calls of an answer."""

    format: str = ""  # a name among `FORMS`
    callees: tuple[Callee, ...] = ()
    must: bool = False  # calls are required; else they are allowed
    several: bool = True  # there may be more than one
    thinking: Thinking | None = None  # that may come before
    opened: bool = False  # the prompt ends within that
    # The rule of an answer without calls, for a format among `MARKED`; None: any text.
    answer: str | None = None
    token: Callable[[str], int | None]  # the id of the added token with this text


def arguments_schema(
    parameters: Mapping[str, Any] | None, param: str, *, lenient: bool = False
) -> str:
    """The schema of a call's arguments, all of which can be enforced. Raises
    GrammarError, which names `param`; with `lenient`, only for a value that is no schema
    of an object.
    """
    if parameters is None:
        return _NO_ARGUMENTS
    kind = parameters.get("type", "object")
    if kind != "object" and "object" not in (kind if isinstance(kind, list) else ()):
        raise GrammarError(f'{param}: must be a schema of the type "object"', param)
    # Arguments are never null, whatever the schema says.
    schema = {**parameters, "type": "object", "nullable": False}
    return _check_cached(json.dumps(schema), param, lenient)


@lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _check_cached(schema: str, param: str, lenient: bool) -> str:
    """As `check_schema`, but once for the tools that an agent sends in each request."""
    return check_schema(schema, param, lenient=lenient)


def grammar(calling: Calling) -> str:
    """A grammar in Lark of calls, and of what may be around them. Raises GrammarError for
    a name that no call could have.
    """
    for callee in calling.callees:
        if not is_tool_name(callee.name):
            raise GrammarError(f"a call cannot have the name {callee.name!r}")
    tool_format = TOOLS[calling.format]
    marks = MarkerRules.of((*tool_format.markers, *tool_format.opens), calling.token)
    lines = (
        _harmony_rules(calling)
        if tool_format.written is None
        else _answer_rules(calling, tool_format, marks)
    )
    shared: list[str] = []
    for i, callee in enumerate(calling.callees):
        arguments = argument_form(tool_format, marks, callee, i)
        lines += [f"arguments_{i}: {arguments.body}", *arguments.rules]
        shared += arguments.shared
    lines += [*dict.fromkeys(shared), *marks.shared, f"TEXT: /{TEXT}/"]
    # These texts mark llama.cpp's grammars. Here they can only be in strings.
    return "\n".join(lines).replace("::=", r"\u003a:=")


def with_reasoning(calling: Calling) -> str:
    """A grammar in Lark of an answer without calls, after the end of its reasoning."""
    lines = [
        "start: thought GAP answer",
        *_reasoning_rules(calling),
        _GAP,
        f"answer: {calling.answer}",
        f"TEXT: /{TEXT}/",
    ]
    return "\n".join(lines)


# --- answers ----------------------------------------------------------------------------


def _answer_rules(
    calling: Calling, tool_format: ToolFormat, marks: MarkerRules
) -> list[str]:
    """The rules from the beginning of an answer down to its calls."""
    written = _call_form(calling, tool_format)
    thought = _reasoning_rules(calling)
    before = ("thought" if calling.opened else "thought?") if thought else ""
    marked = tool_format.begins_with_marker and not written.content
    if marked and not calling.must and calling.answer is None:
        return [
            *_rules_of_calls_in_text(calling, tool_format, written, marks, before),
            *thought,
        ]
    rules = [*thought, *_call_rules(calling, written, marks)]
    if calling.must:
        return [f"start: {before} GAP calls", _GAP, *rules]
    if thought:
        before = f"{before} GAP"
        rules.append(_GAP)
    if calling.answer is not None:
        return [f"start: {before} (calls | answer)", f"answer: {calling.answer}", *rules]
    free = _free_text_terminal(calling, tool_format, written)
    if thought:  # white space after it is the text's
        before = before.removesuffix(" GAP")
        return [f"start: {before} (GAP calls | FREE)", free, *rules]
    return ["start: (calls | FREE)", free, *rules]


def _call_form(calling: Calling, tool_format: ToolFormat) -> CallForm:
    """The form of a model's calls: there may be an older one."""
    if tool_format.older is not None and calling.token(tool_format.older[0]) is None:
        return tool_format.older[1]
    if tool_format.written is None:
        raise AssertionError("a format without a form is refused before")
    return tool_format.written


def _call_rules(calling: Calling, written: CallForm, marks: MarkerRules) -> list[str]:
    """The rules of all calls of an answer, or of a group of them, and of each."""
    head, _, tail = written.call.partition("{arguments}")
    alternatives = [
        f"{marks.rule(head, callee.name)} arguments_{i} {marks.rule(tail)}"
        for i, callee in enumerate(calling.callees)
    ]
    calls = "call"
    if calling.several and written.between is not None:
        calls = f"call ({marks.rule(written.between)} call)*"
    calls = f"{marks.rule(written.begins)} {calls} {marks.rule(written.ends)}"
    if written.lone:
        calls = f"call | {calls}" if calling.several else "call"
    if marks.is_token(written.optional):
        calls = f"{marks.rule(written.optional)}? {calls}"
    return [f"calls: {calls}", f"call: {' | '.join(alternatives)}"]


def _rules_of_calls_in_text(
    calling: Calling,
    tool_format: ToolFormat,
    written: CallForm,
    marks: MarkerRules,
    before: str,
) -> list[str]:
    """The rules of text in which a marker begins each call, or the group of all."""
    leading = marks.leading_marker(written.begins or written.call)
    if written.begins:
        unit, times = "calls", "?"
        written = evolve(written, begins=written.begins.removeprefix(leading))
    else:
        unit, times = "call", "*" if calling.several else "?"
        written = evolve(written, call=written.call.removeprefix(leading))
    around = [
        marks.rule(marker) for marker in tool_format.around if marks.is_token(marker)
    ]
    beside = f"({' | '.join(around)})*" if around else ""
    return [
        f"start: {before} {beside} (begin {unit} {beside}){times} TEXT {beside}",
        *marks.ending("begin", leading),
        *_call_rules(calling, written, marks),
    ]


def _reasoning_rules(calling: Calling) -> list[str]:
    """The rules of reasoning, if there may be any."""
    thinking = calling.thinking
    if thinking is None:
        return []
    marks = MarkerRules.of((thinking.opens, thinking.closes), calling.token)
    opens = marks.rule(thinking.opens)
    if calling.opened:  # some models open it again
        opens = f"{opens}?" if marks.is_token(thinking.opens) else ""
    return [f"thought: {opens} thoughts", *marks.ending("thoughts", thinking.closes)]


def _free_text_terminal(
    calling: Calling, tool_format: ToolFormat, written: CallForm
) -> str:
    """A terminal of text that begins neither as calls do nor with reasoning, and has no
    marker of calls.
    """
    if written.content:
        return f"FREE: /{as_regex(written.content)}{TEXT}/"
    starts = [written.begins or written.call, *([written.call] if written.lone else [])]
    begins = "".join(as_regex(start[0]) for start in starts)
    text = rf"/\s*([^\s{begins}]{TEXT})?/"
    for marker in tool_format.opens:
        text += rf" & ~/{TEXT}{as_regex(marker)}{TEXT}/"
    if calling.thinking is not None:
        text += rf" & ~/\s*{as_regex(calling.thinking.opens)}{TEXT}/"
    return f"FREE: {text}"


def _harmony_rules(calling: Calling) -> list[str]:
    """The rules of messages on channels, of which some are calls."""
    marks = MarkerRules.of(TOOLS[HARMONY].markers, calling.token)
    messages = HarmonyRules(
        names=[callee.name for callee in calling.callees],
        must=calling.must,
        several=calling.several,
        answer=calling.answer,
        mark=marks.rule,
        ending=marks.ending,
    )
    return messages.rules()
