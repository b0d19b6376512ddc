"""The formats there are, by name, and which one a model has.

A model's chat template tells how it was trained to write calls, and its vocabulary has
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

AUTO: Final = "auto"  # what the template says
NONE: Final = "none"
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
# What a template writes, all of it, that was made for a format. Looked for in this order:
# what comes first may be beside what comes later.
_SIGNS: Final = (
    (("<|channel|>",), HARMONY),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=",), "qwen3_coder"),
    (("tool▁call", "```json"), "deepseek_v3"),
    (("tool▁call",), "deepseek_v31"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary',), "llama3_json"),
    (("tools",), "json"),
)
_REASONING_SIGNS: Final = ((("[THINK]",), "mistral"), (("</think>",), "think"))


class UnknownFormatError(ValueError):
    """There is no format of this name."""


@frozen(kw_only=True)
class Parsing:
    """How one answer is to be read: plain data, so that it can travel."""

    tools: str = NONE  # a format, or none
    reasoning: str = NONE
    names: tuple[str, ...] = ()  # of tools that were offered
    typed: tuple[tuple[str, str], ...] = ()  # as `Offered` has them
    opened: bool = False  # the prompt ends within reasoning, up to what was begun
    begun: str = ""  # of the answer, at the end of the prompt
    parallel: bool = True  # whether there may be several calls; else the first counts

    @property
    def markers(self) -> tuple[str, ...]:
        """What has to be in the text: a tokenizer may leave special tokens out."""
        found = TOOLS[self.tools].markers if self.tools != NONE else ()
        if self.reasoning == NONE:
            return found
        thinking = REASONING[self.reasoning]
        return (*found, thinking.opens, thinking.closes)

    def parser(self, *, streaming: bool = True) -> Parser:
        """A parser for an answer, which is told in one piece unless it is `streaming`."""
        tools = TOOLS.get(self.tools)
        thinking = REASONING.get(self.reasoning)
        offered = Offered(frozenset(self.names), frozenset(self.typed))
        made = Parser(tools, offered, thinking, opened=self.opened, streaming=streaming)
        if self.begun:
            made.begin(self.begun)
        return made

    @property
    def thinking(self) -> Thinking | None:
        """The reasoning that the answer begins within, if it does."""
        if (one := REASONING.get(self.reasoning)) is None or one.closes in self.begun:
            return None
        begins = self.opened or self.begun.lstrip().startswith(one.opens)
        return one if begins else None


@frozen
class Parsers:
    """How a model writes calls and reasoning: names of formats, `AUTO` or `NONE`.

    Raises UnknownFormatError.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def __attrs_post_init__(self) -> None:
        _check("tool", self.tools, TOOLS)
        _check("reasoning", self.reasoning, REASONING)

    def settled(self, template: str | None) -> "Parsers":
        """What is meant for a model with this chat template."""
        tools, reasoning = self.tools, self.reasoning
        if tools == AUTO:
            tools = _signed(template or "", _SIGNS)
        if reasoning == AUTO:  # channels have their own
            signs = () if tools == HARMONY else _REASONING_SIGNS
            reasoning = _signed(template or "", signs)
        return Parsers(tools, reasoning)

    def parsing(
        self, offered: Tools, prompt: str, *, parallel: bool = True, begun: str = ""
    ) -> Parsing | None:
        """How to read an answer for which tools were offered; None: as it is.

        `prompt` is how it ends, before what of the answer was `begun`. Calls are looked
        for where there are tools, and channels always.
        """
        tools = self.tools if offered or self.tools == HARMONY else NONE
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


def _signed(template: str, signs: Sequence[tuple[Sequence[str], str]]) -> str:
    """The format that a template was made for."""
    there = (name for sign, name in signs if all(one in template for one in sign))
    return next(there, NONE)
