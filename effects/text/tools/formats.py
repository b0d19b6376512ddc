"""A model's formats of calls and reasoning, by name, and how its answers are parsed."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import frozen

from minfer.effects.text.tools.choice import choose_reasoning, choose_tools
from minfer.effects.text.tools.format import ToolFormat
from minfer.effects.text.tools.nested_tags import NestedTags
from minfer.effects.text.tools.offered import (
    OfferedTools,
    Tools,
    nullable_parameters,
    typed_parameters,
    typed_paths,
)
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.response_template import (
    RESPONSE,
    ResponseReader,
    ResponseTemplateError,
    answer_prefix,
    load,
    markers_of,
)
from minfer.effects.text.tools.table import HARMONY, TOOLS
from minfer.effects.text.tools.tags import Tags
from minfer.effects.text.tools.thinking import REASONING, Thinking

if TYPE_CHECKING:
    from minfer.effects.text.tokenizer import Tokenizer

AUTO: Final = "auto"  # by the checkpoint
NONE: Final = "none"
_FULL_FORMATS: Final = (HARMONY, RESPONSE)  # formats that have more than calls
_log: Final = logging.getLogger("minfer.tools")
UNKNOWN: Final = "unknown"  # what `AUTO` becomes if no format fits: calls stay text


class UnknownFormatError(ValueError):
    """There is no format of this name."""


@frozen(kw_only=True)
class Parsing:
    """How to parse one answer: plain data, to be sent to a process."""

    tools: str = NONE  # a format, or none
    reasoning: str = NONE
    names: tuple[str, ...] = ()  # of the request's tools
    typed: tuple[tuple[str, str], ...] = ()  # as in `OfferedTools`
    nullable: tuple[tuple[str, str], ...] = ()  # likewise
    opened: bool = False  # the prompt ends within reasoning, before `begun`
    begun: str = ""  # of the answer, at the end of the prompt
    response: str = ""  # the checkpoint's response_template, if that is the format
    written: str = ""  # the format in which calls are required, if it is not `tools`
    parallel: bool = True  # whether there may be several calls; else the first counts

    @property
    def form(self) -> str:
        """The format in which calls are written, where they are required."""
        return self.written or self.tools

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must not be skipped: a tokenizer may leave special tokens out."""
        markers = TOOLS[self.form].markers if self.form in TOOLS else ()
        if self.tools == RESPONSE:
            markers = markers_of(self.response)
        if self.reasoning == NONE:
            return markers
        thinking = REASONING[self.reasoning]
        return (*markers, thinking.opens, thinking.closes, *thinking.around)

    def parser(self, *, streaming: bool = True) -> Parser:
        """A parser for an answer; without `streaming`, it emits complete calls only."""
        tools = TOOLS.get(self.tools)
        if self.tools == RESPONSE:
            tools = ToolFormat(dialect=ResponseReader(self.response))
        thinking = REASONING.get(self.reasoning)
        offered = OfferedTools(
            frozenset(self.names), frozenset(self.typed), frozenset(self.nullable)
        )
        parser = Parser(tools, offered, thinking, opened=self.opened, streaming=streaming)
        if self.begun:
            parser.begin(self.begun)
        return parser

    @property
    def thinking(self) -> Thinking | None:
        """The reasoning within which the answer begins, if it does."""
        if (
            thinking := REASONING.get(self.reasoning)
        ) is None or thinking.closes in self.begun:
            return None
        begins = self.opened or self.begun.lstrip().startswith(thinking.opens)
        return thinking if begins else None


@frozen
class Parsers:
    """A model's formats of calls and reasoning: their names, `AUTO` or `NONE`; that of
    calls is `UNKNOWN` if `AUTO` was asked for, and the template shows none.

    Raises UnknownFormatError.
    """

    tools: str = AUTO
    reasoning: str = AUTO
    response: str = ""  # the checkpoint's response_template, if `tools` is that
    written: str = ""  # as in `Parsing`

    def __attrs_post_init__(self) -> None:
        if self.tools != UNKNOWN and not (self.tools == RESPONSE and self.response):
            _check_name("tool", self.tools, TOOLS)
        _check_name("reasoning", self.reasoning, REASONING)

    @property
    def unknown_tools(self) -> bool:
        """Whether it is unknown how the model writes calls: requests with tools cannot be
        answered. With `NONE` the user has chosen that calls stay text.
        """
        return self.tools == UNKNOWN

    def resolve(
        self,
        template: str | None,
        *,
        tokens: Mapping[str, str] | None = None,
        with_tools: str | None = None,
    ) -> "Parsers":
        """The formats for a model with this chat template, without `AUTO`.

        `tokens` are the special tokens that the template names, and `with_tools` is the
        template of conversations with tools, if it is another.
        """
        tools, reasoning = self.tools, self.reasoning
        if tools == AUTO:
            chosen = choose_tools(
                with_tools or template or "", tuple((tokens or {}).items())
            )
            tools = chosen or UNKNOWN
        if reasoning == AUTO:  # channels have their own
            chosen = choose_reasoning(template or "") if tools != HARMONY else None
            reasoning = chosen or NONE
        return Parsers(tools, reasoning)

    def resolve_for(self, tokenizer: "Tokenizer | None") -> "Parsers":
        """The formats for the model of this tokenizer, without `AUTO`."""
        if tokenizer is None:
            return self.resolve(None)
        resolved = self.resolve(
            tokenizer.all_templates,
            tokens=tokenizer.special_tokens,
            with_tools=tokenizer.templates.with_tools,
        )
        response_template = tokenizer.response_template
        if self.tools != AUTO or self.reasoning != AUTO or not response_template:
            return resolved
        try:
            load(response_template)
        except ResponseTemplateError as error:
            _log.warning("%s; it is ignored", error)
            return resolved
        written = "" if resolved.unknown_tools else resolved.tools
        return Parsers(RESPONSE, NONE, response_template, written)

    def parsing(
        self, offered: Tools, prompt: str, *, parallel: bool = True, begun: str = ""
    ) -> Parsing | None:
        """How to parse an answer to a request with these tools; None: it is all content.

        `prompt` is its end, before `begun`, the beginning of the answer. Calls are parsed
        if there are tools, and channels always.
        """
        tools = self.tools if offered or self.tools in _FULL_FORMATS else NONE
        tools = NONE if tools == UNKNOWN else tools
        if tools == self.reasoning == NONE:
            return None
        if tools == RESPONSE:
            begun = answer_prefix(self.response, prompt) + begun
        thinking = REASONING.get(self.reasoning)
        tool_format = TOOLS.get(tools)
        dialect = tool_format.dialect if tool_format is not None else None
        typed = tools == RESPONSE or isinstance(dialect, Tags | NestedTags)
        list_typed = typed_paths if isinstance(dialect, NestedTags) else typed_parameters
        return Parsing(
            tools=tools,
            reasoning=self.reasoning,
            names=tuple(offered),
            typed=tuple(list_typed(offered)) if typed else (),
            nullable=tuple(nullable_parameters(offered)) if typed else (),
            opened=thinking is not None and thinking.open_at_end(prompt),
            begun=begun,
            response=self.response,
            written=self.written,
            parallel=parallel,
        )


def _check_name(kind: str, name: str, formats: Mapping[str, object]) -> None:
    names = (AUTO, NONE, *formats)
    if name not in names:
        message = f"there is no {kind} parser {name!r}"
        raise UnknownFormatError(f"{message}; use one of {', '.join(names)}")
