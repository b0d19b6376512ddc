"""The formats there are, by name, and which one a model has.

A model's chat template tells how it was trained to write calls, and its vocabulary has
the markers. Names are vLLM's where it has the format.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from attrs import frozen

from minfer.effects.text.tokenizer import Tokenizer
from minfer.effects.text.tools import bare, harmony, hermes, llama, mistral
from minfer.effects.text.tools.parser import Format, Parser
from minfer.effects.text.tools.thinking import BRACKETS, THINK, Thinking

AUTO: Final = "auto"  # what the template says
NONE: Final = "none"
HARMONY: Final = "openai"
TOOLS: Final[Mapping[str, Format]] = {
    "hermes": Format(hermes.read, (hermes.OPENS, hermes.CLOSES)),
    "llama3_json": Format(llama.read, (llama.TAG,)),
    # Mistral's templates take no other ids.
    "mistral": Format(
        mistral.read, (mistral.CALLS, mistral.ID, mistral.ARGUMENTS), "", 9
    ),
    "json": Format(bare.read),
    HARMONY: Format(harmony.read, harmony.MARKERS),
}
REASONING: Final[Mapping[str, Thinking]] = {"think": THINK, "mistral": BRACKETS}
# What a template writes that was made for a format. Looked for in this order: what comes
# first may be beside what comes later.
_SIGNS: Final = (
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
    ("tools", "json"),
)
_REASONING_SIGNS: Final = (("[THINK]", "mistral"), ("</think>", "think"))


class UnknownFormatError(ValueError):
    """There is no format of this name."""


@frozen
class Style:
    """How a model writes calls and reasoning; None: not at all."""

    tools: Format | None = None
    thinking: Thinking | None = None

    @property
    def channels(self) -> bool:
        """Whether every answer is in the format, with calls and without."""
        return self.tools is TOOLS[HARMONY]

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """What a parser has to see of an answer, if it looks for `calls` or not."""
        found: tuple[str, ...] = ()
        if self.thinking is not None:
            found += (self.thinking.opens, self.thinking.closes)
        if self.tools is not None and (calls or self.channels):
            found += self.tools.markers
        return found

    def parser(self, names: frozenset[str] | None, *, opened: bool) -> Parser:
        """A parser for one answer; `names` are those of its tools, None: it has none."""
        seen = names is not None or self.channels
        tools = self.tools if seen else None
        return Parser(tools, names or frozenset(), self.thinking, opened=opened)


def style_of(
    tokenizer: Tokenizer | None, tools: str = AUTO, reasoning: str = AUTO
) -> Style:
    """How a model writes, as it is told or as its template has it. UnknownFormatError."""
    template = (tokenizer and tokenizer.chat_template) or ""
    if tools == AUTO:
        tools = _signed(template, _SIGNS)
    if reasoning == AUTO:  # channels have their own
        reasoning = NONE if tools == HARMONY else _signed(template, _REASONING_SIGNS)
    found = _named(TOOLS, tools, "tool")
    return Style(found, _named(REASONING, reasoning, "reasoning"))


def _signed(template: str, signs: Sequence[tuple[str, str]]) -> str:
    """The format that a template was made for."""
    return next((name for sign, name in signs if sign in template), NONE)


Kind = TypeVar("Kind")


def _named(there: Mapping[str, Kind], name: str, kind: str) -> Kind | None:
    if name == NONE:
        return None
    if name not in there:
        known = ", ".join([AUTO, NONE, *there])
        what = f"there is no {kind} parser {name!r}"
        raise UnknownFormatError(f"{what}; use one of {known}")
    return there[name]
