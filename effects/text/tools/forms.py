"""Grammars of answers with tool calls, for calls that are required or strict.

    must         thought? call+                  the answer is calls, and nothing else
    otherwise    thought? (text call)* text      a marker begins a call, which is complete
                 thought? (call+ | text)         of formats without markers
                 thought? (call+ | JSON)         with markers, of answers with a schema

Harmony's, whose answers are messages, are in `harmony_forms.py`.

A call has the form that the model was trained on, but its arguments match their schema.
Markers that are tokens of their own are matched as tokens: the model was not trained on
their text in other tokens, and grammars distinguish the two. Free text has no such
tokens.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.grammars.grammar_library import GrammarError
from minfer.effects.text.grammars.grammar_text import TEXT, json_rule, quote
from minfer.effects.text.grammars.schemas import check_schema
from minfer.effects.text.tools import deepseek, hermes, llama, mistral, qwen_coder
from minfer.effects.text.tools.calls import any_name
from minfer.effects.text.tools.harmony_forms import Messages
from minfer.effects.text.tools.tag_forms import SHARED, tag_form
from minfer.effects.text.tools.text_arguments import TextArgument
from minfer.effects.text.tools.thinking import Thinking

OBJECT: Final = '{"type": "object"}'
_NO_ARGUMENTS: Final = (
    '{"type": "object", "properties": {}, "additionalProperties": false}'
)
_KEPT_SCHEMAS: Final = 128
# An answer that begins with one of these is a call, where formats have no markers.
_BRACE: Final = "{"
_BRACES: Final = r"{\["
_BREAK: Final = "\n"
_GAP: Final = r"GAP: /\n{0,2}/"  # after reasoning


@frozen
class Callee:
    """A tool that may be called, and the schema of its arguments, as text."""

    name: str
    schema: str
    lenient: bool = False  # parts of the schema that cannot be enforced are left free
    text: TextArgument | None = None  # in place of the schema


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


@frozen
class _Form:
    """A format's rules. With a marker, each call begins with it, or the group of all."""

    calls: str  # after the marker
    rules: tuple[str, ...]  # that it uses
    marker: str = ""
    between: str | None = None  # two calls; None: all are after one marker
    begins: str = _BRACE  # without a marker: the first characters of a call
    tagged: bool = False  # arguments are in tags, not JSON
    whole: bool = False  # the rules are of a whole answer


def arguments_schema(
    parameters: Mapping[str, Any] | None, where: str, *, lenient: bool = False
) -> str:
    """The schema of a call's arguments, all of which can be enforced. Raises
    GrammarError, which names `where`; with `lenient`, only for a value that is no schema
    of an object.
    """
    if parameters is None:
        return _NO_ARGUMENTS
    kind = parameters.get("type", "object")
    if kind != "object" and "object" not in (kind if isinstance(kind, list) else ()):
        raise GrammarError(f'{where}: must be a schema of the type "object"', where)
    # Arguments are never null, whatever the schema says.
    schema = {**parameters, "type": "object", "nullable": False}
    return _checked(json.dumps(schema), where, lenient)


@lru_cache(maxsize=_KEPT_SCHEMAS)
def _checked(schema: str, where: str, lenient: bool) -> str:
    """As `check_schema`, but once for the tools that an agent sends in each request."""
    return check_schema(schema, where, lenient=lenient)


def grammar(calling: Calling) -> str:
    """A grammar in Lark of calls, and of what may be around them. Raises GrammarError for
    a name that no call could have.
    """
    for callee in calling.callees:
        if not any_name(callee.name):
            raise GrammarError(f"a call cannot have the name {callee.name!r}")
    form = FORMS[calling.format](calling)
    around = () if form.whole else _answer(calling, form)
    lines = [*around, *form.rules, f"TEXT: /{TEXT}/"]
    for i, callee in enumerate(() if form.tagged else calling.callees):
        lines += _json_arguments(callee, i)
    # These texts mark llama.cpp's grammars. Here they can only be in strings.
    return "\n".join(lines).replace("::=", r"\u003a:=")


def _json_arguments(callee: Callee, number: int) -> list[str]:
    """The rules of a tool's arguments as JSON. Raises GrammarError."""
    rule = f"arguments_{number}"
    if callee.text is None:
        return [f"{rule}: {json_rule(callee.schema)}"]
    text = callee.text.as_json(number)
    return [f"{rule}: {text.body}", *text.rules]


def with_reasoning(calling: Calling) -> str:
    """A grammar in Lark of an answer without calls, after the end of its reasoning."""
    lines = [
        "start: thought GAP answer",
        *_thought(calling),
        _GAP,
        f"answer: {calling.answer}",
        f"TEXT: /{TEXT}/",
    ]
    return "\n".join(lines)


# --- answers ----------------------------------------------------------------------------


def _answer(calling: Calling, form: _Form) -> list[str]:
    """The rules from the beginning of an answer down to its calls."""
    thought = _thought(calling)
    before = ("thought" if calling.opened else "thought?") if thought else ""
    rules = [*thought, f"behind: {form.calls}"]
    several = calling.several and form.between is not None
    if form.marker and not calling.must and calling.answer is None:
        times = "*" if several else "?"
        ending = _ending("begin", form.marker, calling)
        return [f"start: {before} (begin behind){times} TEXT", ending, *rules]
    rules.append(f"one: {_marker(calling, form.marker)} behind")
    rules.append(f"calls: one ({form.between} one)*" if several else "calls: one")
    gap = "GAP" if thought else ""
    if thought:
        rules.append(_GAP)
    if calling.must:
        return [f"start: {before} {gap} calls", *rules]
    if calling.answer is None:
        text = _text_without(form.begins, calling.thinking)
        return [f"start: {before} ({gap} calls | FREE)", f"FREE: {text}", *rules]
    rules.append(f"answer: {calling.answer}")
    return [f"start: {before} {gap} (calls | answer)", *rules]


def _thought(calling: Calling) -> list[str]:
    """The rules of reasoning, if there may be any."""
    thinking = calling.thinking
    if thinking is None:
        return []
    opens = _marker(calling, thinking.opens)
    if calling.opened:  # some models open it again
        opens = f"{opens}?" if calling.token(thinking.opens) is not None else ""
    return [f"thought: {opens} thoughts", _ending("thoughts", thinking.closes, calling)]


def _ending(rule: str, marker: str, calling: Calling) -> str:
    """A rule for text up to a marker. Where that is text, too, the first one counts."""
    lazy = "" if calling.token(marker) is not None else "[lazy]"
    return f"{rule}{lazy}: TEXT {_marker(calling, marker)}"


def _text_without(begins: str, thinking: Thinking | None) -> str:
    """A terminal of text that begins neither with these characters nor with reasoning,
    and has no tag.
    """
    tag = re.escape(llama.TAG)
    text = rf"/\s*([^\s{begins}]{TEXT})?/ & ~/{TEXT}{tag}{TEXT}/"
    if thinking is not None:
        text += rf" & ~/\s*{re.escape(thinking.opens)}{TEXT}/"
    return text


def _marker(calling: Calling, marker: str) -> str:
    token = calling.token(marker) if marker else None
    if token is not None:
        return f"<[{token}]>"
    return quote(marker) if marker else ""


# --- formats ----------------------------------------------------------------------------


def _objects(calling: Calling, key: str = "arguments") -> tuple[str, ...]:
    """The rule of a call as an object."""
    heads = [
        quote(f'{{"name": {json.dumps(one.name)}, "{key}": ') for one in calling.callees
    ]
    calls = [f'{head} arguments_{i} "}}"' for i, head in enumerate(heads)]
    return (f"call: {' | '.join(calls)}",)


def _repeated(calling: Calling, between: str) -> str:
    gap = quote(between) if between else ""
    return f"call ({gap} call)*" if calling.several else "call"


def _hermes(calling: Calling) -> _Form:
    closes = _marker(calling, hermes.CLOSES)
    calls = rf'"\n" call "\n" {closes}'
    return _Form(calls, _objects(calling), hermes.OPENS, r'"\n"')


def _llama(calling: Calling) -> _Form:
    calls = _repeated(calling, "; ")
    if calling.token(llama.TAG) is not None:
        calls = f"{_marker(calling, llama.TAG)}? {calls}"
    return _Form(calls, _objects(calling, "parameters"))


def _mistral(calling: Calling) -> _Form:
    """As lists, or where there is a token before arguments, by name."""
    if calling.token(mistral.ARGUMENTS) is None:
        calls = f'" "? "[" {_repeated(calling, ", ")} "]"'
        return _Form(calls, _objects(calling), mistral.CALLS)
    arguments = _marker(calling, mistral.ARGUMENTS)
    named = [
        f"{quote(one.name)} {arguments} arguments_{i}"
        for i, one in enumerate(calling.callees)
    ]
    return _Form("call", (f"call: {' | '.join(named)}",), mistral.CALLS, "")


def _bare(calling: Calling) -> _Form:
    listed = f' | "[" {_repeated(calling, ", ")} "]"' if calling.several else ""
    return _Form(f"call{listed}", _objects(calling), begins=_BRACES)


def _qwen_coder(calling: Calling) -> _Form:
    forms = [
        tag_form(callee.name, i, callee.schema, lenient=callee.lenient)
        if callee.text is None
        else callee.text.in_tags(i)
        for i, callee in enumerate(calling.callees)
    ]
    ways = [
        f'{quote(f"<function={callee.name}>{_BREAK}")} {form.body} "</function>"'
        for callee, form in zip(calling.callees, forms, strict=True)
    ]
    rules = [rule for form in forms for rule in form.rules]
    closes = _marker(calling, qwen_coder.CLOSES)
    return _Form(
        rf'"\n" call "\n" {closes}',
        (f"call: {' | '.join(ways)}", *rules, *SHARED),
        qwen_coder.OPENS,
        r'"\n"',
        tagged=True,
    )


def _deepseek(calling: Calling, kind: str, behind: str, closes: str) -> _Form:
    """Between tokens, of which the model has all; `kind`, `behind` the name, and what
    `closes` the arguments are text.
    """
    opens, between, ends, end = (
        _marker(calling, one)
        for one in (
            deepseek.CALL,
            deepseek.BETWEEN,
            deepseek.CALL_ENDS,
            deepseek.CALLS_END,
        )
    )
    calls = []
    for i, one in enumerate(calling.callees):
        name = quote(one.name + behind)
        head = f"{quote(kind)} {between} {name}" if kind else f"{name} {between}"
        tail = quote(closes) if closes else ""
        calls.append(f"{opens} {head} arguments_{i} {tail} {ends}")
    listed = _repeated(calling, "\n" if kind else "")
    return _Form(f"{listed} {end}", (f"call: {' | '.join(calls)}",), deepseek.CALLS)


def _deepseek_v3(calling: Calling) -> _Form:
    return _deepseek(calling, "function", "\n```json\n", "\n```")


def _deepseek_v31(calling: Calling) -> _Form:
    return _deepseek(calling, "", "", "")


def _harmony(calling: Calling) -> _Form:
    """Messages on channels, of which some are calls."""
    messages = Messages(
        names=[one.name for one in calling.callees],
        must=calling.must,
        several=calling.several,
        answer=calling.answer,
        mark=partial(_marker, calling),
        ending=partial(_ending, calling=calling),
    )
    return _Form("", tuple(messages.rules()), whole=True)


FORMS: Final[Mapping[str, Callable[[Calling], _Form]]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "qwen3_coder": _qwen_coder,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "openai": _harmony,
    "json": _bare,
}
# Formats with markers, which distinguish calls from answers in JSON.
MARKED: Final = frozenset(
    {"hermes", "mistral", "qwen3_coder", "deepseek_v3", "deepseek_v31", "openai"}
)
