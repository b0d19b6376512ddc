"""The choice of a model's formats, by its chat template.

A template contains the texts of its format, and renders calls in it. So a format whose
texts are there is confirmed: calls are rendered, and read by the format's own reader. A
template that does not render calls is believed if the texts are in no other format.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from minfer.effects.text.tools.deltas import Arguments, CallStart
from minfer.effects.text.tools.format import ToolFormat
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import ROWS
from minfer.effects.text.tools.thinking import SIGNS

_PROBE_NAME: Final = "probe_of_calls"
# A text with what markers are made of, a number and an object: types must come back.
_PROBE_ARGUMENTS: Final[Mapping[str, Any]] = {
    "text": 'a <b> "c"',
    "count": 3,
    "object": {"list": [1, 2], "flag": True},
}
_TYPES: Final = {"text": "string", "count": "integer", "object": "object"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "probe of calls",
        "parameters": {
            "type": "object",
            "properties": {
                # Cohere's templates read what objects have in addition.
                key: {
                    "type": kind,
                    "description": "probe",
                    "additionalProperties": {"type": "string"},
                }
                for key, kind in _TYPES.items()
            },
            "required": [*_PROBE_ARGUMENTS],
        },
    },
}
_MARKER_BEGUN: Final = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_USER: Final = "question to the probe"
_CALL: Final = {
    "id": "call00000",
    "type": "function",
    "function": {"name": _PROBE_NAME, "arguments": {**_PROBE_ARGUMENTS}},
}
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_TYPED_PATHS: Final = (
    "count",
    "object",
    "object/list",
    "object/list/item",
    "object/flag",
)
_OFFERED: Final = OfferedTools(
    frozenset({_PROBE_NAME}), frozenset((_PROBE_NAME, path) for path in _TYPED_PATHS)
)


@lru_cache(maxsize=64)
def choose_tools(template: str, tokens: tuple[tuple[str, str], ...]) -> str | None:
    """The format in which a model with this chat template writes calls; None: it is none
    of the table's.
    """
    signed = [
        name for name, tool_format in ROWS.items() if tool_format.shown_in(template)
    ]
    if not signed:
        return None
    rendered = _rendered_call(template, tokens)
    if rendered is None:
        return next((name for name in signed if ROWS[name].specific), None)
    # If several formats read the call, the format that also writes it so.
    readable = [name for name in signed if _reads(ROWS[name], rendered)]
    as_written = (name for name in readable if _begins_as_written(ROWS[name], rendered))
    return next(as_written, readable[0] if readable else None)


def choose_reasoning(template: str) -> str | None:
    """The format of reasoning that a chat template shows."""
    names = (name for sign, name in SIGNS if all(text in template for text in sign))
    return next(names, None)


def _rendered_call(template: str, tokens: tuple[tuple[str, str], ...]) -> str | None:
    """An answer that is a call, as the template renders it; None if it does not render
    calls.
    """
    from minfer.effects.text.template_probe import TemplateProbe  # it imports jinja2

    probe = TemplateProbe(template, tokens)
    for values in _template_values():
        text = probe.text(_CHAT, {**values, "add_generation_prompt": False}) or ""
        prompt = probe.text(_CHAT[:1], values) or ""
        before = _MARKER_BEGUN.sub("", _common_beginning(text, prompt))
        if _PROBE_NAME in (answer := text[len(before) :]):
            return answer
    return None


def _common_beginning(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    length = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    return first[:length]


def _template_values() -> Iterator[dict[str, Any]]:
    """The variables with which templates may render calls."""
    yield {"tools": [_TOOL]}
    yield {"tools": [_TOOL], "functions": json.dumps([_TOOL])}  # firefunction's


def _begins_as_written(tool_format: ToolFormat, rendered: str) -> bool:
    """Whether a call begins as the format has it."""
    if tool_format.written is None:
        return True
    head = (
        tool_format.written.begins + tool_format.written.call.partition("{arguments}")[0]
    )
    pieces = map(re.escape, re.split("{name}|{index}|{id}|{gap}", head))
    return re.search(r"[\w.]* ?".join(pieces), rendered) is not None


def _reads(tool_format: ToolFormat, rendered: str) -> bool:
    """Whether a format reads the rendered call: one, with its name and arguments."""
    deltas = Parser(tool_format, _OFFERED).push(rendered, final=True)
    names = [delta.name for delta in deltas if isinstance(delta, CallStart)]
    text = "".join(delta.text for delta in deltas if isinstance(delta, Arguments))
    try:
        return names == [_PROBE_NAME] and json.loads(text) == _PROBE_ARGUMENTS
    except ValueError:
        return False
