"""Answers of checkpoints that describe them: the `response_template` of transformers.

It is a table of regions, each with what opens and what closes it, and how its text is
parsed. transformers checks it and parses regions, and is imported only for such
checkpoints; regions are found here, because a closing marker may be within a value: a
region whose text cannot be parsed goes on to the next marker, and if none helps it stays
text, as it was written. Other text is content. Calls are emitted once they are complete.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final

from attrs import define, field

from minfer.effects.text.tools.calls import is_tool_name
from minfer.effects.text.tools.content_patterns import check_time
from minfer.effects.text.tools.delta_writer import DeltaWriter
from minfer.effects.text.tools.offered import OfferedTools
from minfer.effects.text.tools.source import Reading, StreamedText
from minfer.effects.text.tools.tag_values import json_of

RESPONSE: Final = "response_template"  # the name of the format
_REASONING: Final = frozenset({"thinking", "reasoning", "reasoning_content"})
_CALLS: Final = "tool_calls"
_TOKEN: Final = re.compile(r"<[^<>\s]{1,40}>")
_MAX_CLOSES: Final = 64  # that are tried for one region
# Of processor time for a template's patterns, in one answer, and more for each search:
# a pattern may take time that grows with the square of the text, or exponentially.
_MAX_SECONDS: Final = 0.5
_SECONDS_PER_SEARCH: Final = 2e-5
_MAX_SHOWN_CHARS: Final = 80  # characters of a pattern in a message
_log: Final = logging.getLogger("minfer.tools")


class ResponseTemplateError(ValueError):
    """A checkpoint's response_template cannot be used."""


@define
class _BoundaryMatch:
    """What opens or closes a region, where it was found."""

    field: Any  # transformers' record of the region
    match: Any  # of the `regex` library
    opens: bool


@define
class _TimedPatterns:
    """The searches of one answer: once they took too long there are no matches."""

    seconds: float = _MAX_SECONDS  # that are left

    def search(self, pattern: Any, text: str, start: int, *, partial: bool) -> Any:
        """The first match from `start` on, or None."""
        return self._timed(
            lambda seconds: pattern.search(text, start, partial=partial, timeout=seconds),
            f"the pattern {pattern.pattern[:_MAX_SHOWN_CHARS]!r}",
        )

    def parse(self, region: Any, text: str, captures: Mapping[str, Any]) -> Any:
        """The value of a region's text, or None. Raises what transformers raises."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        def parse(seconds: float) -> Any:
            check_time(text, region.content, region.content_args, seconds)
            return process_field(text, region, dict(captures))

        return self._timed(parse, f"the content of {region.name!r}")

    def _timed(self, work: Callable[[float], Any], description: str) -> Any:
        """What `work` makes of the seconds that are left, or None."""
        if self.seconds <= 0:
            return None
        start = time.thread_time()
        result = None
        try:
            result = work(self.seconds)
        except TimeoutError:
            self.seconds = 0.0
        finally:
            self.seconds += _SECONDS_PER_SEARCH - (time.thread_time() - start)
            self.seconds = min(self.seconds, _MAX_SECONDS)
        if self.seconds > 0:
            return result
        _log.warning(
            "the checkpoint's response_template: %s takes too long; the rest of this "
            "answer stays text",
            description,
        )
        return None


@lru_cache(maxsize=16)
def load(text: str) -> Any:
    """transformers' record of a template, which is JSON here. Raises
    ResponseTemplateError.
    """
    try:
        from transformers.utils.chat_parsing.response_templates import (
            load_response_template,
        )

        template = load_response_template(json.loads(text))
    except Exception as error:  # of an older transformers, and whatever it raises
        reason = f"the checkpoint's response_template cannot be used: {error}"
        raise ResponseTemplateError(reason) from error
    if template.implicit == _CALLS:
        reason = "calls without a marker are not supported"
        raise ResponseTemplateError(f"the checkpoint's response_template: {reason}")
    for region in template.fields.values():
        if reason := _region_fault(region):
            prefix = f"the checkpoint's response_template: field {region.name!r}"
            raise ResponseTemplateError(f"{prefix}: {reason}")
    return template


def _region_fault(region: Any) -> str:
    """What transformers does not check of a region; empty if that is right."""
    if not isinstance(region.content_args, Mapping):
        return "'content_args' must be a dict"
    for pattern in (region.open_re, region.close_re):
        if pattern is not None and _matches_empty_text(pattern):
            shown = pattern.pattern[:_MAX_SHOWN_CHARS]
            return f"the pattern {shown!r} matches an empty text"
    return ""


def _matches_empty_text(pattern: Any) -> bool:
    """Whether a pattern matches an empty text before the end of an answer."""
    match = _TimedPatterns().search(pattern, "\0\0", 0, partial=False)
    return match is not None and match.start() == match.end()


def markers_of(text: str) -> tuple[str, ...]:
    """The texts of a template that may be special tokens."""
    fields = json.loads(text)["fields"].values()
    literals = [region.get(key, ()) for region in fields for key in ("open", "close")]
    listed = [[literal] if isinstance(literal, str) else literal for literal in literals]
    tokens = _TOKEN.findall(text.replace("\\\\", "").replace('\\"', '"'))
    return tuple(dict.fromkeys([*chain.from_iterable(listed), *tokens]))


def answer_prefix(text: str, prompt: str) -> str:
    """The part of the answer at the end of a prompt; empty if it does not show."""
    matches = load(text).start_anchor_re.finditer(prompt, timeout=_MAX_SECONDS)
    try:
        ends = [match.end() for match in matches]
    except TimeoutError:
        return ""
    return prompt[ends[-1] :] if ends else ""


@define
class ResponseReader:
    """The reader of one template's answers; the template is JSON."""

    text: str
    opens: Sequence[str] = field(default=())

    def read(
        self, source: StreamedText, out: DeltaWriter, tools: OfferedTools
    ) -> Reading[None]:
        """Read a whole answer."""
        template = load(self.text)
        fields = template.fields.values()
        implicit = template.fields.get(template.implicit)
        watched = [
            (region, region.open_re, True)
            for region in fields
            if region.open_re is not None
        ]
        if implicit is not None and implicit.close_re is not None:
            watched.append((implicit, implicit.close_re, False))
        emit = _emitter(template.implicit or "", out)
        patterns = _TimedPatterns()
        while (
            boundary := (yield from _take_until_match(source, watched, emit, patterns))
        ) is not None:
            if boundary.opens and boundary.field.name == _CALLS:
                yield from _read_calls(source, out, tools, boundary, patterns)
                continue
            out.mark()
            if boundary.opens:
                yield from _read_text(source, out, boundary.field, patterns)


def _emitter(name: str, out: DeltaWriter) -> Callable[[str], None]:
    return out.reasoning if name in _REASONING else out.content


def _read_text(
    source: StreamedText, out: DeltaWriter, region: Any, patterns: _TimedPatterns
) -> Reading[None]:
    """Take a region of text, up to its end."""
    closes = [] if region.close_re is None else [(region, region.close_re, False)]
    yield from _take_until_match(source, closes, _emitter(region.name, out), patterns)
    out.mark()


def _read_calls(
    source: StreamedText,
    out: DeltaWriter,
    tools: OfferedTools,
    opening: _BoundaryMatch,
    patterns: _TimedPatterns,
) -> Reading[None]:
    """Take a region of calls; if no closing marker makes it one, it stays text."""
    region = opening.field
    closes = [] if region.close_re is None else [(region, region.close_re, False)]
    source.keep(opening.match[0])
    pieces: list[str] = []
    for _ in range(_MAX_CLOSES):
        closing = yield from _take_until_match(source, closes, pieces.append, patterns)
        captures = opening.match.groupdict()
        if closing is not None:
            captures |= closing.match.groupdict()
        calls = _calls_of(region, "".join(pieces), captures, patterns)
        if calls:
            for name, arguments in calls:
                out.start(name)
                out.arguments(_typed_arguments(name, arguments, tools))
                out.end(complete=True)
            source.take_kept()
            return
        if closing is None:
            break
        pieces.append(closing.match[0])
    out.content(source.take_kept())


def _calls_of(
    region: Any, text: str, captures: Mapping[str, Any], patterns: _TimedPatterns
) -> list[tuple[str, Mapping[str, Any]]]:
    """The names and arguments of the calls in a region; empty if it cannot be parsed."""
    named = {name: value for name, value in captures.items() if value is not None}
    try:
        value = patterns.parse(region, text, named)
        return [*map(_call, value if isinstance(value, list) else [value])]
    except Exception:  # a checkpoint's own template: transformers does not check all
        return []


def _call(value: Any) -> tuple[str, Mapping[str, Any]]:
    """The name and arguments of a call. Raises ValueError, KeyError or TypeError."""
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    name, arguments = function["name"], function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise TypeError("arguments must be an object")
    if not isinstance(name, str) or not name or not is_tool_name(name):
        raise TypeError("a name must be one that a tool can have")
    return name, arguments


def _typed_arguments(name: str, arguments: Mapping[str, Any], tools: OfferedTools) -> str:
    """Arguments as JSON; those that are text but cannot be, by their schema, are what the
    text says.
    """
    return f"{{{', '.join(_members(name, arguments, tools))}}}"


def _members(
    name: str, arguments: Mapping[str, Any], tools: OfferedTools
) -> Iterator[str]:
    dumps = partial(json.dumps, ensure_ascii=False)
    for key, value in arguments.items():
        text = dumps(value)
        if isinstance(value, str) and (name, key) in tools.typed:
            text = json_of(value)
        elif value == "null" and (name, key) in tools.nullable:
            text = "null"
        yield f"{dumps(key)}: {text}"


def _take_until_match(
    source: StreamedText,
    watched: Sequence[tuple[Any, Any, bool]],
    emit: Callable[[str], None],
    patterns: _TimedPatterns,
) -> Reading[_BoundaryMatch | None]:
    """Take text and emit it, up to the first match of these patterns; take that, too.
    Returns it, or None at the end. A match at the end of the text may become longer.
    """
    while True:
        boundary: _BoundaryMatch | None = None
        safe_end = len(source.text)
        for region, pattern, opens in watched:
            match = patterns.search(
                pattern, source.text, source.position, partial=not source.ended
            )
            if match is None or (not match.partial and match.start() == match.end()):
                continue
            grows = match.partial or match.end() == len(source.text)
            if grows and not source.ended:
                safe_end = min(safe_end, match.start())
            elif boundary is None or _match_order(match) < _match_order(boundary.match):
                boundary = _BoundaryMatch(region, match, opens)
        if boundary is not None and boundary.match.start() < safe_end:
            emit(source.take(boundary.match.start() - source.position))
            source.take(len(boundary.match[0]))
            return boundary
        emit(source.take(safe_end - source.position))
        if source.ended:
            return None
        yield


def _match_order(match: Any) -> tuple[int, int]:
    """Earlier matches come first, and of these the longer one."""
    return match.start(), -match.end()
