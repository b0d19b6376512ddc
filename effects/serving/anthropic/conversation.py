"""A conversation as Anthropic's API has it: a system prompt, and turns of text blocks.

Turns of one role that follow each other are one, and a last turn of the assistant's is
what the answer begins with, as there.
"""

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from minfer.effects.live.edge import MAX_CLIENT
from minfer.effects.serving.bodies import ANYTHING, StrictObject
from minfer.effects.serving.protocol import Grounds
from minfer.effects.serving.typed import TypedObject, as_parts

MAX_ITEMS: Final = 4096  # messages; blocks of one
# Fields that are not supported, with the values at which they ask for nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_control": (ANYTHING,),  # prefixes are cached anyway
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "tools": ([],),
}

_OF_BLOCKS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_control": (ANYTHING,),
    "citations": ([],),
}


class TextBlock(TypedObject):
    """A piece of text."""

    kinds = ("text",)
    neutral = _OF_BLOCKS
    text: str


Few = Field(fail_fast=True, max_length=MAX_ITEMS)
Blocks = Annotated[
    list[TextBlock],
    Few,
    BeforeValidator(
        partial(as_parts, "text"), json_schema_input_type=str | list[TextBlock]
    ),
]


class MessageTurn(StrictObject):
    """One turn."""

    role: Literal["user", "assistant"]
    content: Blocks


class Metadata(StrictObject):
    """Who asks."""

    user_id: Annotated[str, Field(max_length=MAX_CLIENT)] = ""


class ConversationBody(StrictObject):
    """What is read of a conversation, be it answered or counted."""

    neutral = _NEUTRAL
    model: str | None = None
    system: Blocks | None = None
    messages: Annotated[list[MessageTurn], Few, Field(min_length=1)]

    def ids(self, llm: Grounds) -> list[int]:
        """The conversation as token ids, up to where the answer begins. Raises
        ChatTemplateError and RequestError.
        """
        turns = (
            [{"role": "system", "content": joined(self.system)}] if self.system else []
        )
        for role, of_role in groupby(self.messages, key=lambda one: one.role):
            blocks = [block for one in of_role for block in one.content]
            turns.append({"role": role, "content": joined(blocks)})
        begun = self.messages[-1].role == "assistant"
        return llm.render(
            turns, add_generation_prompt=not begun, continue_final_message=begun
        )


def joined(blocks: list[TextBlock]) -> str:
    """The text of blocks; each is a line."""
    return "\n".join([block.text for block in blocks])
