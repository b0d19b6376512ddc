"""All formats, by name, and the choice of a model's.

A model's chat template shows how it was trained to write calls, and its vocabulary has
the markers. Names are vLLM's where it has the format.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import frozen

from minfer.effects.text.tools.choice import chosen_reasoning, chosen_tools
from minfer.effects.text.tools.offered import (
    Offered,
    Tools,
    nullable_parameters,
    typed_parameters,
)
from minfer.effects.text.tools.parser import Parser
from minfer.effects.text.tools.table import HARMONY, TOOLS
from minfer.effects.text.tools.tags import Tags
from minfer.effects.text.tools.thinking import REASONING, Thinking

if TYPE_CHECKING:
    from minfer.effects.text.tokenizer import Tokenizer

AUTO: Final = "auto"  # by the template
NONE: Final = "none"
UNKNOWN: Final = "unknown"  # what `AUTO` becomes if no format fits: calls stay text


class UnknownFormatError(ValueError):
    """There is no format of this name."""


@frozen(kw_only=True)
class Parsing:
    """How to parse one answer: plain data, to be sent to a process."""

    tools: str = NONE  # a format, or none
    reasoning: str = NONE
    names: tuple[str, ...] = ()  # of the request's tools
    typed: tuple[tuple[str, str], ...] = ()  # as in `Offered`
    nullable: tuple[tuple[str, str], ...] = ()  # likewise
    opened: bool = False  # the prompt ends within reasoning, before `begun`
    begun: str = ""  # of the answer, at the end of the prompt
    parallel: bool = True  # whether there may be several calls; else the first counts

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must not be skipped: a tokenizer may leave special tokens out."""
        found = TOOLS[self.tools].markers if self.tools != NONE else ()
        if self.reasoning == NONE:
            return found
        thinking = REASONING[self.reasoning]
        return (*found, thinking.opens, thinking.closes, *thinking.around)

    def parser(self, *, streaming: bool = True) -> Parser:
        """A parser for an answer; without `streaming`, it emits complete calls only."""
        tools = TOOLS.get(self.tools)
        thinking = REASONING.get(self.reasoning)
        offered = Offered(
            frozenset(self.names), frozenset(self.typed), frozenset(self.nullable)
        )
        made = Parser(tools, offered, thinking, opened=self.opened, streaming=streaming)
        if self.begun:
            made.begin(self.begun)
        return made

    @property
    def thinking(self) -> Thinking | None:
        """The reasoning within which the answer begins, if it does."""
        if (one := REASONING.get(self.reasoning)) is None or one.closes in self.begun:
            return None
        begins = self.opened or self.begun.lstrip().startswith(one.opens)
        return one if begins else None


@frozen
class Parsers:
    """A model's formats of calls and reasoning: their names, `AUTO` or `NONE`; that of
    calls is `UNKNOWN` if `AUTO` was asked for, and the template shows none.

    Raises UnknownFormatError.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def __attrs_post_init__(self) -> None:
        if self.tools != UNKNOWN:
            _check("tool", self.tools, TOOLS)
        _check("reasoning", self.reasoning, REASONING)

    @property
    def unknown_tools(self) -> bool:
        """Whether nobody knows how the model writes calls: requests with tools cannot be
        answered. With `NONE` the user has chosen that calls stay text.
        """
        return self.tools == UNKNOWN

    def settled(
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
            found = chosen_tools(
                with_tools or template or "", tuple((tokens or {}).items())
            )
            tools = found or UNKNOWN
        if reasoning == AUTO:  # channels have their own
            found = chosen_reasoning(template or "") if tools != HARMONY else None
            reasoning = found or NONE
        return Parsers(tools, reasoning)

    def settled_for(self, tokenizer: "Tokenizer | None") -> "Parsers":
        """The formats for the model of this tokenizer, without `AUTO`."""
        if tokenizer is None:
            return self.settled(None)
        return self.settled(
            tokenizer.all_templates,
            tokens=tokenizer.special_tokens,
            with_tools=tokenizer.templates.with_tools,
        )

    def parsing(
        self, offered: Tools, prompt: str, *, parallel: bool = True, begun: str = ""
    ) -> Parsing | None:
        """How to parse an answer to a request with these tools; None: it is all content.

        `prompt` is its end, before `begun`, the beginning of the answer. Calls are parsed
        if there are tools, and channels always.
        """
        tools = self.tools if offered or self.tools == HARMONY else NONE
        tools = NONE if tools == UNKNOWN else tools
        if tools == self.reasoning == NONE:
            return None
        thinking = REASONING.get(self.reasoning)
        typed = tools != NONE and isinstance(TOOLS[tools].dialect, Tags)
        return Parsing(
            tools=tools,
            reasoning=self.reasoning,
            names=tuple(offered),
            typed=tuple(typed_parameters(offered)) if typed else (),
            nullable=tuple(nullable_parameters(offered)) if typed else (),
            opened=thinking is not None and thinking.open_at_end(prompt),
            begun=begun,
            parallel=parallel,
        )


def _check(kind: str, name: str, there: Mapping[str, object]) -> None:
    known = (AUTO, NONE, *there)
    if name not in known:
        what = f"there is no {kind} parser {name!r}"
        raise UnknownFormatError(f"{what}; use one of {', '.join(known)}")
