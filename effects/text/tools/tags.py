"""Calls in tags, with the bare text of each parameter.

    <tool_call>                      <tool_call>NAME
    <function=NAME>                  <arg_key>KEY</arg_key>
    <parameter=KEY>                  <arg_value>VALUE</arg_value>
    VALUE                            </tool_call>
    </parameter>
    </function>
    </tool_call>

A value is text, which is sent as it comes, unless its schema, or the tag itself, requires
another type: then it is JSON, or Python's notation of it, once it is complete; if it is
neither it is text. A text that may be null by its schema is null if it is the word.
Models leave tags out: the first one, if the name is that of a tool, and closing ones.
Text between parameters, where there should be none, is content after the call.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from html import unescape
from typing import Final

from attrs import define

from minfer.effects.text.tools.calls import is_bare_name, skip_stray
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
from minfer.effects.text.tools.tag_values import (
    NestedCall,
    TakeValue,
    ValueEnds,
    nullable_value,
    quoted,
    text_value,
    typed_value,
    without_partial_tag,
)

_NAME: Final = re.compile(r"[^<>{}\[\]|\s\"]*")
_FIELDS: Final = {
    "{name}": "",
    "{key}": r"(?P<key>.*?)",
    "{string}": "(?P<string>true|false)",
    "{type}": "(?P<type>string|number|integer|boolean|object|array|null)",
    "{index}": "[0-9]*",
}
_FIELD: Final = re.compile("|".join(map(re.escape, _FIELDS)))
_NO_ARGUMENTS: Final = "{}"
_TAG: Final = re.compile("<[^<>{}]*>")
_TEXT_ATTRIBUTES: Final = ("true", "string")  # what attributes say of a text


@define(frozen=True, slots=False, kw_only=True)
class Tags:
    """A format whose calls are in tags."""

    function: str  # the tag of a call, with {name}
    parameter: str  # the tag before a value, with {key}, and {string} or {type}
    parameter_ends: str
    function_ends: str = ""
    group: tuple[str, ...] = ()  # tags before calls, any of them
    group_ends: tuple[str, ...] = ()
    breaks: bool = False  # one line break belongs to each tag around a value
    escaped: bool = False  # keys are escaped as in HTML
    drops: tuple[str, ...] = ()  # markers around an answer

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""

        def body(marker: str) -> Reading[bool]:
            return (yield from self._calls(source, out, tools, marker))

        yield from sections(
            source, out, self.opens, body, closes=self._closing, drops=self.drops
        )

    @cached_property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        return (*self.group, *filter(None, [self._function[0]]))

    @property
    def literals(self) -> tuple[str, ...]:
        """The tags that have no fields in them."""
        texts = (self.function, self.parameter, self.parameter_ends, self.function_ends)
        pieces = [piece for text in texts for piece in _FIELD.split(text)]
        return tuple(
            dict.fromkeys(tag for piece in pieces for tag in _TAG.findall(piece))
        )

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The texts that may end a value, or begin a call within it."""
        ends = self._value_ends
        return (*ends.sure, *ends.unsure, ends.nested.begins)

    @cached_property
    def _function(self) -> tuple[str, str]:
        """The tag of a call before and after its name."""
        before, _, after = self.function.partition("{name}")
        return before, after

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        """The tags after which there are no more parameters."""
        return (*filter(None, [self.function_ends]), *self.group_ends)

    @cached_property
    def _closing(self) -> tuple[str, ...]:
        return (self.parameter_ends, *self._ends)

    @cached_property
    def _begins_value(self) -> str:
        """The beginning of a parameter's tag."""
        return self.parameter[: self.parameter.index("{")]

    @cached_property
    def _key(self) -> tuple[str, re.Pattern[str]]:
        """The end of a parameter's tag, and the pattern between beginning and end."""
        return _rest_of_tag(self.parameter[len(self._begins_value) :])

    @cached_property
    def _value_ends(self) -> ValueEnds:
        """What may come after a value: a text may have any tag in it, so that a closing
        one counts if what follows it is right; and others may be missing.
        """
        function_ends = [
            f"\n{self.function_ends}\n{group_end}" for group_end in self.group_ends
        ]
        return ValueEnds(
            sure=(
                *([f"\n{self.parameter_ends}"] if self.breaks else []),
                f"\n{self._begins_value}",
                *(function_ends if self.function_ends else []),
            ),
            unsure=(
                self.parameter_ends,
                *(() if self.function_ends else self.group_ends),
            ),
            follow=(self._begins_value, *self._closing, *self.opens),
            nested=self._nested,
        )

    @property
    def _nested(self) -> NestedCall:
        """A call within a value: its tags with a first parameter, or with its end."""
        before, after = self._function
        ends = self.function_ends or self.group_ends[0]
        next_tag = "|".join(map(re.escape, (self._begins_value, ends)))
        head = rf"{_NAME.pattern}{_as_pattern(after)}\s*({next_tag})"
        return NestedCall(
            begins=before or self.group[0], head=re.compile(head), ends=ends
        )

    def _calls(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools, marker: str
    ) -> Reading[bool]:
        """Take the calls of a group, or one; returns whether there is nothing else."""
        grouped = marker in self.group
        before, after = self._function
        if grouped:
            yield from take_repeats(source, marker)
            if before and not (yield from peek_any(source, [before])):
                return False
            source.take(len(before))
        while True:
            name = yield from take_matching(source, _NAME)
            empty = yield from self._is_empty(source, after)
            if not empty and not (yield from self._tag_ends(source, after)):
                return False
            if not (name in tools.names or (grouped and is_bare_name(name))) or not name:
                return False
            out.start(name)
            if empty:
                out.arguments(_NO_ARGUMENTS)
                end = self.function_ends if out.end(complete=True) else None
            else:
                end = yield from self._arguments(source, out, name, tools)
            if end is None:
                return False
            source.keep()
            if not (yield from self._takes_another(source, end)):
                return True

    def _is_empty(self, source: StreamedText, after: str) -> Reading[bool]:
        """Take the end of a tag that is a whole call, `/>`, if it is one."""
        if not after or "{" in after:
            return False
        end = yield from peek_any(source, [f"{after[:-1]}/>", after])
        source.take(len(end) if end != after else 0)
        return bool(end) and end != after

    def _tag_ends(self, source: StreamedText, after: str) -> Reading[bool]:
        """Take what comes after the name in the tag of a call; returns whether it is
        right.
        """
        if not after:
            yield from take_space(source)
            return bool((yield from peek_any(source, [self._begins_value, *self._ends])))
        if "{" in after:
            last, pattern = _rest_of_tag(after)
            pieces: list[str] = []
            marker = yield from take_until(source, [last, *self._ends], pieces.append)
            return marker == last and bool(pattern.fullmatch("".join(pieces)))
        tag_end = yield from peek_any(source, [after])
        source.take(len(tag_end))
        return bool(tag_end)

    def _takes_another(self, source: StreamedText, end: str) -> Reading[bool]:
        """Take what follows a call; returns whether that begins one more in its group."""
        before = self._function[0]
        if end and end not in self.group_ends:
            yield from skip_stray(source)
            candidates = [*self.group_ends, *filter(None, [before])]
            after = yield from peek_any(source, candidates)
            source.take(len(after))
            if after and after == before:
                return True
        yield from skip_stray(source)
        return False

    def _arguments(
        self, source: StreamedText, out: DeltaWriter, name: str, tools: OfferedTools
    ) -> Reading[str | None]:
        """Take parameters and emit them as an object, up to the end of a call; returns
        the tag there, or None if the call was not emitted.
        """
        lead = "{"
        stray_text: list[str] = []
        boundaries = (self._begins_value, *self._ends)
        last, pattern = self._key
        marker = yield from take_until(source, boundaries, stray_text.append)
        while marker.endswith(self._begins_value):
            pieces: list[str] = []
            marker = yield from take_until(source, [last, *self._ends], pieces.append)
            tag = pattern.fullmatch("".join(pieces)) if marker == last else None
            if tag is None:
                stray_text += [
                    self._begins_value,
                    *pieces,
                    *([last] if marker == last else ()),
                ]
            else:
                if self.breaks and (yield from peek_any(source, ["\n"])):
                    source.take(1)
                key = unescape(tag["key"]) if self.escaped else tag["key"]
                out.arguments(f"{lead}{quoted(key)}: ")
                lead = ", "
                take = _value_reader(tag.groupdict(), (name, key), tools)
                marker = yield from take(source, out, self._value_ends)
            if marker.endswith(self.parameter_ends) or marker == last:
                marker = yield from take_until(source, boundaries, stray_text.append)
        if marker:
            out.arguments(_NO_ARGUMENTS if lead == "{" else "}")
        if not out.end(complete=bool(marker)):
            return None
        out.content(
            without_partial_tag(
                "".join(stray_text).strip(), (*boundaries, self.parameter_ends)
            )
        )
        return marker


def _value_reader(
    attributes: Mapping[str, str], parameter: tuple[str, str], tools: OfferedTools
) -> TakeValue:
    """The reader of a value: by the attributes of its tag, or by its schema."""
    stated = attributes.get("string", attributes.get("type"))
    if stated is not None:
        return text_value if stated in _TEXT_ATTRIBUTES else typed_value
    if parameter in tools.typed:
        return typed_value
    return nullable_value if parameter in tools.nullable else text_value


def _rest_of_tag(text: str) -> tuple[str, re.Pattern[str]]:
    """The last part of a tag whose beginning was read, and the pattern before that."""
    last = text[text.rindex("}") + 1 :].split()[-1]
    return last, re.compile(_as_pattern(text.removesuffix(last)), re.DOTALL)


def _as_pattern(tag: str) -> str:
    """A part of a tag as a pattern."""
    literals = map(_with_flexible_spaces, _FIELD.split(tag))
    fields = [_FIELDS[name] for name in _FIELD.findall(tag)]
    return "".join(a + b for a, b in zip(literals, [*fields, ""], strict=True))


def _with_flexible_spaces(text: str) -> str:
    """A text as a pattern, with any white space where it has some."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))
