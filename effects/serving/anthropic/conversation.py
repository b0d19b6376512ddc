"""Conversations of Anthropic's API: a system prompt, and turns of blocks.

As in that API, successive turns of one role are one, and the answer continues a last turn
of the assistant.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from minfer.effects.live.input_processing.input_processor import MAX_CLIENT
from minfer.effects.serving.anthropic.blocks import (
    AnthropicTool,
    AnthropicToolChoice,
    Blocks,
    Few,
    TextBlock,
    Texts,
    Turn,
    check_choice,
    check_role,
    turns_of,
)
from minfer.effects.serving.protocol import ModelInfo
from minfer.effects.serving.request_parsing.answer_parsing import check_template
from minfer.effects.serving.request_parsing.bodies import HINT, StrictObject
from minfer.effects.serving.request_parsing.typed_objects import template_content

# Fields that are not supported, with the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_control": (HINT,),  # prefixes are cached anyway
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only", HINT),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
}


class MessageTurn(StrictObject):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Blocks

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        check_role(self.role, self.content)
        return self


class Metadata(StrictObject):
    """The user of a request."""

    user_id: Annotated[str, Field(max_length=MAX_CLIENT)] = ""


class ConversationBody(StrictObject):
    """The fields of a conversation, whether it is answered or counted."""

    neutral = _NEUTRAL
    model: str | None = None
    system: Texts | None = None
    messages: Annotated[list[MessageTurn], Few, Field(min_length=1)]
    tools: Annotated[list[AnthropicTool], Few] | None = None
    tool_choice: AnthropicToolChoice | None = None

    @model_validator(mode="after")
    def _choice_fits(self) -> Self:
        check_choice(self.tools or (), self.tool_choice)
        return self

    @property
    def offered(self) -> list[AnthropicTool]:
        """The tools in the prompt."""
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else self.tools or []

    @property
    def prefix(self) -> str:
        """The beginning of the answer: the last text of an assistant's last turn."""
        last = self.messages[-1]
        if last.role != "assistant":
            return ""
        if isinstance(last.content, str):
            return last.content
        block = last.content[-1] if last.content else None
        return block.text if isinstance(block, TextBlock) else ""

    def ids(self, llm: ModelInfo) -> list[int]:
        """The conversation as token ids, up to where the answer begins. Raises
        ChatTemplateError, RequestError and ApiError.
        """
        system = template_content(self.system or "")
        turns: list[Turn] = [{"role": "system", "content": system}] if system else []
        for role, of_role in groupby(self.messages, key=lambda one: one.role):
            turns += turns_of(role, [one.content for one in of_role])
        if self.offered:
            check_template(llm.parsers, "tools")
        elif any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            check_template(llm.parsers, "messages")
        # After a call the answer is a turn of its own.
        continues = turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]
        return llm.render(
            turns,
            tools=[tool.to_json() for tool in self.offered] or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
