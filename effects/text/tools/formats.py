"""All formats, by name, and the choice of a model's.

A model's chat template shows how it was trained to write calls, and its vocabulary has
the markers. Names are vLLM's where it has the format.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen

from minfer.effects.text.tools import (
    bare,
    deepseek,
    harmony,
    hermes,
    llama,
    mistral,
    qwen_coder,
)
from minfer.effects.text.tools.offered import Offered, Tools, typed_parameters
from minfer.effects.text.tools.parser import Format, Parser
from minfer.effects.text.tools.thinking import BRACKETS, THINK, Thinking

AUTO: Final = "auto"  # by the template
NONE: Final = "none"
UNKNOWN: Final = "unknown"  # what `AUTO` becomes if no format fits: calls stay text
HARMONY: Final = "openai"
TOOLS: Final[Mapping[str, Format]] = {
    "hermes": Format(hermes.read, (hermes.OPENS, hermes.CLOSES), (hermes.OPENS,)),
    "llama3_json": Format(llama.read, (llama.TAG,), (llama.TAG,)),
    # Mistral's templates take no other ids.
    "mistral": Format(
        mistral.read,
        (mistral.CALLS, mistral.ID, mistral.ARGUMENTS),
        (mistral.CALLS,),
        prefix="",
        letters=9,
    ),
    "qwen3_coder": Format(
        qwen_coder.read,
        (qwen_coder.OPENS, qwen_coder.CLOSES),
        (qwen_coder.OPENS,),
        typed=True,
    ),
    "deepseek_v3": Format(deepseek.read, deepseek.MARKERS, (deepseek.CALLS,)),
    "deepseek_v31": Format(deepseek.read, deepseek.MARKERS, (deepseek.CALLS,)),
    "json": Format(bare.read),
    HARMONY: Format(harmony.read, harmony.MARKERS),
}
REASONING: Final[Mapping[str, Thinking]] = {"think": THINK, "mistral": BRACKETS}
# Texts of templates that show their format, all of them together. Searched in this order:
# the texts of an earlier one may be beside those of a later one.
_SIGNS: Final = (
    (("<|channel|>",), HARMONY),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=",), "qwen3_coder"),
    (("tool▁call", "```json"), "deepseek_v3"),
    (("tool▁call",), "deepseek_v31"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
)
_REASONING_SIGNS: Final = ((("[THINK]",), "mistral"), (("</think>",), "think"))


class UnknownFormatError(ValueError):
    """There is no format of this name."""


@frozen(kw_only=True)
class Parsing:
    """How to parse one answer: plain data, to be sent to a process."""

    tools: str = NONE  # a format, or none
    reasoning: str = NONE
    names: tuple[str, ...] = ()  # of the request's tools
    typed: tuple[tuple[str, str], ...] = ()  # as in `Offered`
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
        return (*found, thinking.opens, thinking.closes)

    def parser(self, *, streaming: bool = True) -> Parser:
        """A parser for an answer; without `streaming`, it emits complete calls only."""
        tools = TOOLS.get(self.tools)
        thinking = REASONING.get(self.reasoning)
        offered = Offered(frozenset(self.names), frozenset(self.typed))
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

    def settled(self, template: str | None) -> "Parsers":
        """The formats for a model with this chat template, without `AUTO`."""
        tools, reasoning = self.tools, self.reasoning
        if tools == AUTO:
            tools = _signed(template or "", _SIGNS, UNKNOWN)
        if reasoning == AUTO:  # channels have their own
            signs = () if tools == HARMONY else _REASONING_SIGNS
            reasoning = _signed(template or "", signs, NONE)
        return Parsers(tools, reasoning)

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
        typed = tools != NONE and TOOLS[tools].typed
        return Parsing(
            tools=tools,
            reasoning=self.reasoning,
            names=tuple(offered),
            typed=tuple(typed_parameters(offered)) if typed else (),
            opened=thinking is not None and thinking.open_at_end(prompt),
            begun=begun,
            parallel=parallel,
        )


def _check(kind: str, name: str, there: Mapping[str, object]) -> None:
    known = (AUTO, NONE, *there)
    if name not in known:
        what = f"there is no {kind} parser {name!r}"
        raise UnknownFormatError(f"{what}; use one of {', '.join(known)}")


def _signed(
    template: str, signs: Sequence[tuple[Sequence[str], str]], default: str
) -> str:
    """The format that a template shows."""
    there = (name for sign, name in signs if all(one in template for one in sign))
    return next(there, default)
