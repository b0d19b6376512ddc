"""Calls of MiniMax M3: arguments are tags by their names, and lists and objects are tags
in tags; a token comes before each.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="NAME">]<]minimax[>[<city>Zürich]<]minimax[>[</city>
    ]<]minimax[>[<days>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</days>...

(without the line breaks before the token). A value that has tags in it is a list if these
are items, and an object else; other values are text, unless the schema says otherwise.
"""

import re
from typing import Final

from attrs import frozen

from minfer.effects.text.tools.calls import emit_arguments, is_tool_name, start_call
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.sections import sections
from minfer.effects.text.tools.source import (
    Reading,
    StreamedText,
    peek_any,
    take_matching,
    take_repeats,
    take_space,
    take_until,
)
from minfer.effects.text.tools.tag_values import json_of, partial_json, quoted

_NAME: Final = re.compile(r"[^<>\[\]/\s\"]*")
_ITEM: Final = "item"
_MAX_DEPTH: Final = 64  # levels of objects and lists


@frozen(kw_only=True)
class NestedTags:
    """A format whose arguments are tags in tags, each after a token."""

    mark: str  # the text of the token

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        return (f"{self.mark}<tool_call>", self._invoke)

    @property
    def _invoke(self) -> str:
        return f'{self.mark}<invoke name="'

    @property
    def _ends(self) -> tuple[str, ...]:
        return (f"{self.mark}</invoke>", f"{self.mark}</tool_call>")

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""

        def body(marker: str) -> Reading[bool]:
            return (yield from self._calls(source, out, tools, marker))

        yield from sections(
            source, out, self.opens, body, closes=self._ends, strays=False
        )

    def _calls(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools, marker: str
    ) -> Reading[bool]:
        """Take the calls of a group; returns whether there is nothing else."""
        end_of_call, end_of_group = self._ends
        if marker != self._invoke:
            yield from take_repeats(source, marker)
            if not (yield from peek_any(source, [self._invoke])):
                return False
            source.take(len(self._invoke))
        while True:
            name = yield from take_matching(source, _NAME)
            if (
                not name
                or not is_tool_name(name)
                or not (yield from peek_any(source, ['">']))
            ):
                return False
            source.take(2)
            start_call(source, out, name)
            complete = yield from self._members(
                source, out, tools, (name, ""), end_of_call
            )
            if not out.end(complete=complete) or not complete:
                return False
            source.keep()
            yield from take_space(source)
            after = yield from peek_any(source, [self._invoke, end_of_group])
            source.take(len(after))
            if after != self._invoke:
                return True

    def _members(
        self,
        source: StreamedText,
        out: DeltaWriter,
        tools: OfferedTools,
        path: tuple[str, str],
        end: str,
        levels: int = _MAX_DEPTH,
    ) -> Reading[bool]:
        """Take the tags up to an end, and emit them as an object, or as a list if they
        are items; returns whether they are complete.
        """
        lead, closes = "{", "{}"
        while True:
            yield from take_space(source)
            if (yield from peek_any(source, [end])):
                source.take(len(end))
                emit_arguments(source, out, closes)
                return True
            key = yield from self._tag(source)
            if not key or not levels:
                return False
            if lead == "{" and key == _ITEM and path[1]:
                lead = "["
            is_list = lead == "[" or closes == "]"
            if is_list and key != _ITEM:
                return False
            emit_arguments(source, out, lead if is_list else f"{lead}{quoted(key)}: ")
            lead, closes = ", ", "]" if is_list else "}"
            if not (yield from self._value(source, out, tools, path, key, levels)):
                return False

    def _tag(self, source: StreamedText) -> Reading[str]:
        """Take an opening tag; returns the name in it, or an empty string."""
        opens = f"{self.mark}<"
        if not (yield from peek_any(source, [opens])):
            return ""
        source.take(len(opens))
        name = yield from take_matching(source, _NAME)
        if not name or not (yield from peek_any(source, [">"])):
            return ""
        source.take(1)
        return name

    def _value(
        self,
        source: StreamedText,
        out: DeltaWriter,
        tools: OfferedTools,
        path: tuple[str, str],
        key: str,
        levels: int,
    ) -> Reading[bool]:
        """Take a value and its closing tag; returns whether it is complete."""
        name, parent = path
        parameter = (name, f"{parent}/{key}" if parent else key)
        end = f"{self.mark}</{key}>"
        next_tag = yield from peek_any(source, [f"{self.mark}</", f"{self.mark}<"])
        if next_tag == f"{self.mark}<":
            return (
                yield from self._members(source, out, tools, parameter, end, levels - 1)
            )
        if parameter not in tools.typed:
            emit_arguments(source, out, '"')
            marker = yield from take_until(
                source,
                [end],
                lambda text: emit_arguments(source, out, quoted(text)[1:-1]),
            )
            emit_arguments(source, out, '"' if marker else "")
            return bool(marker)
        pieces: list[str] = []
        marker = yield from take_until(source, [end], pieces.append)
        text = "".join(pieces)
        emit_arguments(source, out, json_of(text) if marker else partial_json(text))
        return bool(marker)
