"""Calls of Qwen's coders: in tags, with the bare text of each parameter.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is text, which is sent as it comes, unless its schema requires another type: then
it is JSON, or Python's notation of it, once it is complete; if it is neither it is text.
One line break belongs to each tag around a value. Models leave tags out: the first one,
if the name is that of a tool, and closing ones. Text between parameters, where there
should be none, is content after the call.
"""

import json
import re
from typing import Final

from minfer.effects.text.tools.calls import any_name, skip_stray
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.json_scanner import JsonScanner
from minfer.effects.text.tools.offered import Offered
from minfer.effects.text.tools.python_values import as_json
from minfer.effects.text.tools.source import (
    Reading,
    Source,
    ahead,
    repeats,
    run,
    space,
    until,
)

OPENS: Final = "<tool_call>"
CLOSES: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_FUNCTION_ENDS: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_ENDS: Final = "</parameter>"
_CLOSING: Final = (_PARAMETER_ENDS, _FUNCTION_ENDS, CLOSES)
_WITHIN: Final = (_PARAMETER, _FUNCTION_ENDS, CLOSES)  # between two parameters
_TAGS: Final = (*_WITHIN, _PARAMETER_ENDS)
_BEHIND: Final = (  # after a value; the first one that is there
    f"\n{_PARAMETER_ENDS}",
    _PARAMETER_ENDS,
    f"\n{_PARAMETER}",
    f"\n{_FUNCTION_ENDS}\n{CLOSES}",
)
_NAME: Final = re.compile(r"[^<>{}\[\]|\s]*")
_WORDS: Final = {"true": "true", "false": "false", "none": "null", "null": "null"}


def read(source: Source, out: DeltaWriter, tools: Offered) -> Reading[None]:
    """Read a whole answer."""
    # After a call, its closing tags may come after unexpected text.
    markers = [OPENS, _FUNCTION]
    while marker := (yield from until(source, markers, out.content)):
        if marker in _CLOSING:
            continue
        source.keep(marker)
        name = yield from _name(source, marker)
        known = name in tools.names or (marker == OPENS and any_name(name))
        emitted = False
        if name and known:
            out.start(name)
            emitted = yield from _arguments(source, out, name, tools)
        left = source.kept()
        markers = [OPENS, _FUNCTION, *(_CLOSING if emitted else ())]
        if emitted:
            yield from skip_stray(source)
        else:
            out.content(left)


def _name(source: Source, marker: str) -> Reading[str]:
    """Take the text before the first parameter; returns the name of the call, if any."""
    if marker == OPENS:
        yield from repeats(source, OPENS)
        if not (yield from ahead(source, [_FUNCTION])):
            return ""
        source.take(len(_FUNCTION))
    name = yield from run(source, _NAME)
    if not (yield from ahead(source, [">"])):
        return ""
    source.take(1)
    return name


def _arguments(
    source: Source, out: DeltaWriter, name: str, tools: Offered
) -> Reading[bool]:
    """Take parameters and emit them as an object, up to the end of a call; returns
    whether it was emitted.
    """
    before = "{"
    odd: list[str] = []
    marker = yield from until(source, _WITHIN, odd.append)
    while marker.endswith(_PARAMETER):
        parts: list[str] = []
        marker = yield from until(source, [">"], parts.append)
        if not marker:
            break
        key = "".join(parts)
        out.arguments(f"{before}{_quoted(key)}: ")
        before = ", "
        if (yield from ahead(source, ["\n"])):
            source.take(1)
        take = _typed if (name, key) in tools.typed else _text
        marker = yield from take(source, out)
        if marker.endswith(_PARAMETER_ENDS):
            marker = yield from until(source, _WITHIN, odd.append)
    if marker:
        out.arguments("{}" if before == "{" else "}")
    if not out.end(whole=bool(marker)):
        return False
    if marker == _FUNCTION_ENDS:
        yield from space(source)
        if (yield from ahead(source, [CLOSES])):
            source.take(len(CLOSES))
    out.content(_without_begun_tag("".join(odd).strip()))
    return True


def _without_begun_tag(text: str) -> str:
    """A text without an incomplete tag at its end."""
    at = text.rfind("<")
    begun = at >= 0 and any(tag.startswith(text[at:]) for tag in _TAGS)
    return text[:at] if begun else text


def _text(source: Source, out: DeltaWriter) -> Reading[str]:
    """Take a value that is text; returns the tag after it."""
    out.arguments('"')
    marker = yield from until(
        source, _BEHIND, lambda text: out.arguments(_quoted(text)[1:-1])
    )
    if marker:
        out.arguments('"')
    return marker


def _typed(source: Source, out: DeltaWriter) -> Reading[str]:
    """Take a value that is no text; returns the tag after it."""
    parts: list[str] = []
    marker = yield from until(source, _BEHIND, parts.append)
    value = "".join(parts)
    out.arguments(_as_json(value) if marker else _begun(_without_begun_tag(value)))
    return marker


def _begun(value: str) -> str:
    """An incomplete value, as the beginning of JSON."""
    text = value.strip()
    scanner = JsonScanner()
    begins = scanner.feed(text) == len(text)
    return scanner.taken() if begins else _quoted(value)[:-1]


def _as_json(value: str) -> str:
    """A value as JSON."""
    text = value.strip()
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.end()
    if scanner.done and end == len(text):
        return scanner.taken()
    return _WORDS.get(text.lower()) or as_json(text) or _quoted(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
