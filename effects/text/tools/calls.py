"""A call as a JSON object, `{"name": ..., "arguments": {...}}`, and lists of these.

A call begins for the client once its name and the first brace of its arguments are there;
until then it may turn out to be none, and its text is kept. From then on arguments are
sent as they come, as far as they begin a JSON object: one that goes wrong is incomplete
for the client, and the wrong text is content after it. Without streaming, a call begins
once its arguments are complete.

`parameters` means the same as `arguments`, and `tool_name` as `name`, in either order
(arguments that come before the name are kept), and models write arguments as a string
that holds JSON, too.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Final

from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.json_scanner import JsonScanner
from minfer.effects.text.tools.source import (
    SPACE,
    Reading,
    StreamedText,
    peek_char,
    take_matching,
    take_space,
    take_until,
)

_NAME_KEYS: Final = ("name", "tool_name")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
# The fields of a call.
_CALL_KEYS: Final = frozenset(
    {*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "tool_call_id"}
)
_STRAY_BRACKETS: Final = re.compile(r"[\s}\]]*")
_NO_ARGUMENTS: Final = "{}"  # arguments of a call without any
# The pattern of a name that no quotes or tag are around: punctuation is within it only.
NAME: Final = r"[\w-]+?(?:[.:/][\w-]+?)*?"
Accept = Callable[[str], bool]  # whether a name can be that of a call
Emit = Callable[[str], None]


def is_tool_name(name: str) -> bool:
    """Whether a name could be a tool's: it need not be one of the request's tools."""
    return name.isprintable() and not set(name) & set(" <>{}[]|")


def is_bare_name(name: str) -> bool:
    """Whether a name could be a tool's, where neither quotes nor a tag are around it."""
    return re.fullmatch(NAME, name) is not None


def take_value(source: StreamedText, emit: Emit, *, mended: bool = True) -> Reading[bool]:
    """Take a JSON value, and emit it as it comes, `mended` as by a scanner or unchanged;
    returns whether it is complete.
    """
    scanner = JsonScanner()
    while True:
        end = scanner.feed(source.text, source.position)
        taken = source.take(end - source.position)
        scanned = scanner.take_accepted()
        if text := scanned if mended else taken:
            emit(text)
        if scanner.done or scanner.broken:
            return scanner.done
        if source.ended:
            scanner.end()
            return scanner.done
        yield


def take_string(source: StreamedText) -> Reading[str | None]:
    """Take a JSON string; returns its value, or None if there is none."""
    if (yield from peek_char(source)) != '"':
        return None
    pieces: list[str] = []
    complete = yield from take_value(source, pieces.append)
    return str(json.loads("".join(pieces))) if complete else None


def stream_arguments(source: StreamedText, out: DeltaWriter, name: str) -> Reading[bool]:
    """Take the arguments of a call, and emit it; returns whether they are complete.

    `source` keeps the text that was not emitted.
    """
    out.start(name)
    complete = yield from take_value(source, out.arguments)
    if out.end(complete=complete):
        source.keep()
    return complete


def start_call(source: StreamedText, out: DeltaWriter, name: str) -> None:
    """Begin a call. The source forgets the text that it comes from, as in
    `emit_arguments`.
    """
    out.start(name)
    _settle(source, out)


def emit_arguments(source: StreamedText, out: DeltaWriter, text: str) -> None:
    """Emit arguments. The source forgets the text they come from, if it has become a call
    for good.
    """
    out.arguments(text)
    _settle(source, out)


def _settle(source: StreamedText, out: DeltaWriter) -> None:
    source.settle()
    if out.streaming:
        source.keep()


class _CallReader:
    """A call that is being read; it is emitted once name and arguments are known."""

    def __init__(self, source: StreamedText, out: DeltaWriter, accept: Accept) -> None:
        self.source = source
        self.out = out
        self.accept = accept
        self.name: str | None = None
        self.arguments: str | None = None  # kept until the name is known
        self.emitted = False

    def field(self) -> Reading[bool]:
        """Take a key with its value; returns whether they may be those of a call."""
        source = self.source
        key = yield from take_string(source)
        if key is None or (not self.emitted and key not in _CALL_KEYS):
            return False
        yield from take_space(source)
        if (yield from peek_char(source)) != ":":
            return False
        source.take(1)
        yield from take_space(source)
        if key in _NAME_KEYS:
            if self.name is not None:
                return False
            self.name = yield from take_string(source)
            return bool(self.name) and self.accept(str(self.name)) and self._emit()
        if key in _ARGUMENT_KEYS:
            has_arguments = self.emitted or self.arguments is not None
            return False if has_arguments else (yield from self._arguments())
        complete = yield from take_value(source, lambda _: None)
        if complete and key not in _CALL_KEYS:  # after the call
            self.out.content(source.take_kept().lstrip(f",{SPACE}"))
            source.keep()
        return complete

    def _arguments(self) -> Reading[bool]:
        first = yield from peek_char(self.source)
        if first == "{" and self.name is not None:
            self.emitted = True
            return (yield from stream_arguments(self.source, self.out, self.name))
        if first not in ("{", '"', "n"):
            return False
        pieces: list[str] = []
        if not (yield from take_value(self.source, pieces.append)):
            return False
        text = "".join(pieces)
        if first == '"':
            text = str(json.loads(text))
        self.arguments = _NO_ARGUMENTS if text == "null" else _mend_object(text)
        return self.arguments is not None and self._emit()

    def _emit(self) -> bool:
        """Emit the call, if all of it is known."""
        if self.name is not None and self.arguments is not None and not self.emitted:
            self.emitted = True
            self.out.start(self.name)
            self.out.arguments(self.arguments)
            self.out.end(complete=True)
            self.source.keep()
        return True

    def finish(self, *, bare: bool) -> bool:
        """Handle the end of the fields; returns whether it is a call. With `bare`, it may
        be one without arguments.
        """
        if not self.emitted and self.name is not None and bare:
            self.arguments = _NO_ARGUMENTS
            self._emit()
        return self.emitted


def take_call(
    source: StreamedText,
    out: DeltaWriter,
    accept: Accept = is_tool_name,
    *,
    bare: bool = True,
) -> Reading[bool]:
    """Take an object, and emit it if it is a call; `source` keeps the text that was not.

    Returns whether it was complete, and a call. With `bare`, it may be without arguments.
    """
    if (yield from peek_char(source)) != "{":
        return False
    source.take(1)
    reader = _CallReader(source, out, accept)
    while True:
        yield from take_space(source)
        if not (yield from reader.field()):
            return False
        yield from take_space(source)
        after = yield from peek_char(source)
        if after not in (",", "}") or not after:
            return False
        source.take(1)
        if after == "}":
            return reader.finish(bare=bare)


def take_calls(
    source: StreamedText,
    out: DeltaWriter,
    accept: Accept = is_tool_name,
    *,
    bare: bool = True,
) -> Reading[bool]:
    """Take a list of calls, or one call as `take_call` does; returns whether it was
    complete.
    """
    if (yield from peek_char(source)) != "[":
        return (yield from take_call(source, out, accept, bare=bare))
    source.take(1)
    while True:
        yield from take_space(source)
        if not (yield from take_call(source, out, accept, bare=bare)):
            return False
        source.keep()
        yield from take_space(source)
        after = yield from peek_char(source)
        if after not in (",", "]") or not after:
            return False
        source.take(1)
        if after == "]":
            source.keep()
            return True


def skip_stray(source: StreamedText) -> Reading[str]:
    """Take white space, and brackets that close nothing."""
    return (yield from take_matching(source, _STRAY_BRACKETS))


def take_after_call(
    source: StreamedText,
    out: DeltaWriter,
    left: str,
    markers: Sequence[str],
    *,
    strays: bool = True,
) -> Reading[str]:
    """Take the wrong text after an emitted call, of which `left` was taken before, up to
    a marker, and that too; returns it. `strays`, brackets that close nothing, are left
    out.
    """
    source.put_back(left)
    if strays:
        yield from skip_stray(source)
    return (yield from take_until(source, markers, out.content))


def _mend_object(text: str) -> str | None:
    """A text that is a JSON object and nothing else, mended as by a scanner."""
    text = text.strip(SPACE)
    scanner = JsonScanner()
    end = scanner.feed(text)
    complete = text.startswith("{") and scanner.done and end == len(text)
    return scanner.take_accepted() if complete else None
