"""Calls as each format has them written, made from its declaration."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from minfer.effects.text.tools.format import CallForm, ToolFormat
from minfer.effects.text.tools.gemma import GemmaCalls
from minfer.effects.text.tools.nested_tags import NestedTags
from minfer.effects.text.tools.python_calls import PythonCalls
from minfer.effects.text.tools.table import HARMONY, ROWS, TOOLS
from minfer.effects.text.tools.tags import Tags

Call = tuple[str, Mapping[str, Any]]
# The formats whose calls can be written from their declaration.
WRITTEN: Final = tuple(name for name in ROWS if ROWS[name].written is not None)
# Texts with what formats are made of, and other values, by their types in a schema.
MARKERS: Final = " ".join(
    dict.fromkeys(
        marker for form in ROWS.values() for marker in (*form.opens, *form.markers)
    )
)
NASTY: Final[Mapping[str, Any]] = {
    "markup": 'a <b> & "c" {d} [e] \\ \' (f), g=1: </h>',
    "lines": "\n a\n\n\tb\r\n",
    "unicode": "Zürich 東京 🙂 \u2028",
    "empty": "",
    "digits": "5",
    "word": "null",
    "count": -3,
    "ratio": 2.5e-3,
    "flag": False,
    "nothing": None,
    "object": {"a": [1, "x, y", None, {"b c": True}], "d": {}},
    "list": [],
}
TYPES: Final = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}


def schema(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the types of arguments."""
    kinds = {key: {"type": TYPES[type(value)]} for key, value in arguments.items()}
    return {"type": "object", "properties": kinds, "required": [*arguments]}


def answer(name: str, calls: Sequence[Call]) -> str:
    """An answer that is these calls, in a format of this name."""
    if name == HARMONY:
        start = "<|start|>assistant"
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
        messages = (header.format(call, json.dumps(args)) for call, args in calls)
        return f"<|call|>{start}".join(messages)
    if isinstance(dialect := TOOLS[name].dialect, NestedTags):
        mark = dialect.mark
        shown = (
            f'{mark}<invoke name="{call}">{_nested(args, mark)}{mark}</invoke>\n'
            for call, args in calls
        )
        return f"{mark}<tool_call>\n{''.join(shown)}{mark}</tool_call>"
    return written_answer(TOOLS[name], calls)


def written_answer(form: ToolFormat, calls: Sequence[Call]) -> str:
    """An answer that is these calls, in a format."""
    written = form.written
    assert written is not None
    texts = (_call(form, written, call, i) for i, call in enumerate(calls))
    return _filled(
        f"{written.begins}{(written.between or '').join(texts)}{written.ends}", 0
    )


def _call(form: ToolFormat, written: CallForm, call: Call, index: int) -> str:
    name, arguments = call
    head, _, tail = written.call.partition("{arguments}")
    text = _filled(head.replace("{name}", name), index)
    return text + arguments_of(form, written, arguments) + tail


def _filled(text: str, index: int) -> str:
    for field, value in {"{index}": index, "{id}": f"id-{index}", "{gap}": " "}.items():
        text = text.replace(field, str(value))
    return text


def arguments_of(
    form: ToolFormat, written: CallForm, arguments: Mapping[str, Any]
) -> str:
    """Arguments in the notation of a format."""
    match form.dialect:
        case Tags():
            return "".join(
                written.parameter.replace("{key}", key)
                .replace("{kind}", "true" if isinstance(value, str) else "false")
                .replace(
                    "{value}", value if isinstance(value, str) else json.dumps(value)
                )
                for key, value in arguments.items()
            )
        case PythonCalls():
            return ", ".join(f"{key}={argument!r}" for key, argument in arguments.items())
        case GemmaCalls(quote=quote):
            return _gemma(arguments, quote)
    return json.dumps(arguments, ensure_ascii=False)


def _nested(value: Any, mark: str) -> str:
    match value:
        case str():
            return value
        case dict():
            pairs = [*value.items()]
        case list():
            pairs = [("item", item) for item in value]
        case _:
            return json.dumps(value)
    tags = (f"{mark}<{key}>{_nested(item, mark)}{mark}</{key}>" for key, item in pairs)
    return "".join(tags)


def _gemma(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            pairs = (f"{key}:{_gemma(item, quote)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        case list():
            return f"[{','.join(_gemma(item, quote) for item in value)}]"
    return json.dumps(value)
