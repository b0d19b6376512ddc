"""Answers split into content, reasoning and tool calls, each choice by itself.

This happens where answers are written, after all work on tokens: a writer passes an
output, and gets what is new in it as deltas.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import define, field

from minfer.effects.live.input_processing.template_settings import UNKNOWN_FORMAT_MESSAGE
from minfer.effects.live.served_model import ServedModel
from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.protocol import GenerationRequest, ModelInfo
from minfer.effects.serving.request_parsing.reasoning_tokens import ReasoningTokens
from minfer.effects.text.outputs import CompletionOutput
from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools.deltas import (
    Arguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from minfer.effects.text.tools.formats import NONE, Parsers, Parsing
from minfer.effects.text.tools.offered import Tools
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import TOOLS

_log: Final = logging.getLogger("minfer.parsers")
_MARKER_TOKENS: Final = 16  # of a prompt in which its last marker is


def parsing_of(
    llm: ModelInfo,
    prompt: Sequence[int],
    tools: Tools,
    *,
    parallel: bool = True,
    prefix: str = "",
) -> Parsing | None:
    """How to parse an answer to a prompt with these tools, if the prompt ends with
    `prefix`, the beginning of the answer.
    """
    end = ""
    if llm.tokenizer is not None and (prefix or llm.parsers.reasoning != NONE):
        end = end_of(llm, prompt, len(prefix))
        before, separator, _ = (
            end.rpartition(prefix.strip()) if prefix.strip() else ("", "", "")
        )
        # A template may have changed it: then the beginning is unknown.
        prefix = end[len(before) :] if separator else ""
        end = before if separator else end
    return llm.parsers.parsing(tools, end, parallel=parallel, begun=prefix)


def end_of(llm: ModelInfo, prompt: Sequence[int], num_chars: int = 0) -> str:
    """The end of a prompt: its last marker, and `num_chars` characters."""
    if llm.tokenizer is None:
        return ""
    return llm.tokenizer.decode(
        prompt[-(_MARKER_TOKENS + num_chars) :], skip_special_tokens=False
    )


def check_template(parsers: Parsers, param: str) -> None:
    """Raise ApiError if the model's format of tool calls is unknown."""
    if parsers.unknown_tools:
        remedy = (
            "leave tools out, or have the server started with --tool-call-parser and the "
            "model's format, or none, so that calls stay text"
        )
        raise ApiError(f"{param}: {UNKNOWN_FORMAT_MESSAGE}; {remedy}", param)


def log_unknown_format(llm: ServedModel) -> None:
    """Log, once at the start of a server, that requests with tools will be refused."""
    if llm.parsers.unknown_tools and llm.tokenizer and llm.tokenizer.all_templates:
        _log.warning(
            "%s: requests with tools are refused; --tool-call-parser names the model's "
            "format (%s), or none, so that calls stay text",
            UNKNOWN_FORMAT_MESSAGE,
            ", ".join(TOOLS),
        )


class AnswerParser:
    """The parsers of an answer's choices, while they come. With a tokenizer, their
    reasoning tokens are counted.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer | None = None
    ) -> None:
        self._reasoning = ReasoningTokens(request, tokenizer)
        self._parsing = request.parsing
        self._streaming = request.stream
        self._parsers: dict[int, Parser] = {}  # by choice, until they end
        self._calling: set[int] = set()  # choices with a complete call

    def read(self, choice: int, output: CompletionOutput) -> list[Delta]:
        """The new deltas of a choice."""
        if self._parsing is None:
            return [ContentDelta(output.text)] if output.text else []
        if choice not in self._parsers:
            self._parsers[choice] = self._parsing.parser(streaming=self._streaming)
        parser = self._parsers[choice]
        deltas = parser.push(output.text, final=output.finish_reason is not None)
        if not self._parsing.parallel:
            deltas = [delta for delta in deltas if not getattr(delta, "index", 0)]
        self._reasoning.add(choice, output.token_ids, deltas)
        if any(isinstance(delta, CallEnd) and delta.complete for delta in deltas):
            self._calling.add(choice)
        if output.finish_reason is not None:
            del self._parsers[choice]
        return deltas

    @property
    def reasoning_tokens(self) -> int:
        """The reasoning tokens of all choices by now."""
        return self._reasoning.count

    def calls(self, choice: int) -> bool:
        """Whether a choice has complete calls by now."""
        return choice in self._calling


@define
class ParsedCall:
    """One call."""

    id: str
    name: str
    arguments: str = ""


@define
class ParsedAnswer:
    """All deltas of a choice, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> "ParsedAnswer":
        """Put deltas together."""
        answer = cls()
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    answer.content += text
                case ReasoningDelta(text):
                    answer.reasoning += text
                case CallStart(_, name_id, name):
                    answer.calls.append(ParsedCall(name_id, name))
                case Arguments(_, text):
                    answer.calls[-1].arguments += text
                case CallEnd():
                    pass
        return answer
