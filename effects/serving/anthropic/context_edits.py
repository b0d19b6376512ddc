"""Edits of a conversation before the model reads it: `context_management` in Anthropic's
API.

Old reasoning, and old results of tools, are left out; the client keeps its own whole
conversation. The answer says what each edit has removed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from attrs import evolve, frozen
from pydantic import BeforeValidator, Field, model_validator

from minfer.effects.serving.anthropic.blocks import (
    ContentBlock,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from minfer.effects.serving.anthropic.documents import ItemLimit
from minfer.effects.serving.request_parsing.bodies import (
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.typed_objects import (
    TypedObject,
    read_by_type,
)

CLEARED: Final = "[The result of this call was cleared to save context.]"
# Anthropic's defaults.
_TRIGGER_TOKENS: Final = 100_000
_KEPT_TOOL_USES: Final = 3
_KEPT_THINKING_TURNS: Final = 1

Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


@frozen
class EditedTurn:
    """A message of a conversation that is edited."""

    role: str
    content: str | Sequence[ContentBlock]


@frozen
class AppliedEdit:
    """The result of one edit."""

    turns: Sequence[EditedTurn]
    number: int  # of turns with thinking, or of tool uses


class Trigger(TypedObject):
    """When tool uses are cleared: above that number of prompt tokens or tool uses."""

    kinds = ("input_tokens", "tool_uses")
    value: Positive = _TRIGGER_TOKENS


class KeptToolUses(TypedObject):
    """The number of the latest tool uses that are kept."""

    kinds = ("tool_uses",)
    value: Count


class LeastTokens(TypedObject):
    """The number of tokens below which nothing is cleared."""

    kinds = ("input_tokens",)
    value: Count


class KeptThinking(TypedObject):
    """The number of the latest turns whose thinking is kept."""

    kinds = ("thinking_turns", "all")
    value: Positive = _KEPT_THINKING_TURNS


def _kept_thinking(value: object) -> object:
    return {"type": "all"} if value == "all" else value


class ClearToolUses(TypedObject):
    """Clears the results of old tool uses."""

    kinds = ("clear_tool_uses_20250919",)
    trigger: Trigger = Trigger(type="input_tokens")
    keep: KeptToolUses = KeptToolUses(type="tool_uses", value=_KEPT_TOOL_USES)
    clear_at_least: LeastTokens | None = None
    exclude_tools: Annotated[list[str], ItemLimit] = Field(default_factory=list)
    clear_tool_inputs: bool | Annotated[list[str], ItemLimit] = False
    counted: ClassVar[str] = "cleared_tool_uses"

    def apply(self, turns: Sequence[EditedTurn], tokens: int) -> AppliedEdit:
        """The edited turns of a prompt of `tokens` tokens."""
        uses = [block for block in _blocks(turns) if isinstance(block, ToolUseBlock)]
        size = len(uses) if self.trigger.type == "tool_uses" else tokens
        first_kept = max(0, len(uses) - self.keep.value)
        excluded = frozenset(self.exclude_tools)
        # Some clients give several tool uses one id: it is kept with any of them.
        kept_ids = {
            use.id
            for index, use in enumerate(uses)
            if index >= first_kept or use.name in excluded
        }
        old_ids = {use.id for use in uses} - kept_ids
        cleared = {
            block.tool_use_id
            for block in _blocks(turns)
            if isinstance(block, ToolResultBlock)
            and block.tool_use_id in old_ids
            and block.content != CLEARED
        }
        if size <= self.trigger.value or not cleared:
            return AppliedEdit(turns, 0)

        def clear(block: ContentBlock) -> ContentBlock:
            if isinstance(block, ToolResultBlock) and block.tool_use_id in cleared:
                return block.model_copy(update={"content": CLEARED})
            if isinstance(block, ToolUseBlock) and block.id in cleared:
                inputs = self.clear_tool_inputs
                if inputs is True or (inputs and block.name in inputs):
                    return block.model_copy(update={"input": {}})
            return block

        edited = [
            turn
            if isinstance(turn.content, str)
            else evolve(turn, content=list(map(clear, turn.content)))
            for turn in turns
        ]
        return AppliedEdit(edited, len(cleared))

    @property
    def min_cleared_tokens(self) -> int:
        """The number of tokens below which nothing is cleared."""
        return 0 if self.clear_at_least is None else self.clear_at_least.value


class ClearThinking(TypedObject):
    """Clears the reasoning of old turns."""

    kinds = ("clear_thinking_20251015",)
    keep: Annotated[
        KeptThinking,
        BeforeValidator(
            _kept_thinking, json_schema_input_type=KeptThinking | Literal["all"]
        ),
    ] = KeptThinking(type="thinking_turns")
    counted: ClassVar[str] = "cleared_thinking_turns"
    min_cleared_tokens: ClassVar[int] = 0

    def apply(
        self,
        turns: Sequence[EditedTurn],
        tokens: int,  # noqa: ARG002  # another edit needs it
    ) -> AppliedEdit:
        """The edited turns."""
        thinking = [
            index
            for index, turn in enumerate(turns)
            if turn.role == "assistant" and any(map(_is_thinking, _blocks([turn])))
        ]
        num_kept = len(thinking) if self.keep.type == "all" else self.keep.value
        old_turns = set(thinking[: max(0, len(thinking) - num_kept)])
        edited = [
            evolve(
                turn,
                content=[block for block in _blocks([turn]) if not _is_thinking(block)],
            )
            if index in old_turns
            else turn
            for index, turn in enumerate(turns)
        ]
        return AppliedEdit(edited, len(old_turns))


Edit = ClearToolUses | ClearThinking
_EDITS: Final[Mapping[str, type[Edit]]] = {
    kind: edit for edit in (ClearToolUses, ClearThinking) for kind in edit.kinds
}

AnyEdit = Annotated[
    Edit, BeforeValidator(partial(read_by_type, _EDITS), json_schema_input_type=Edit)
]


class ContextManagement(StrictObject):
    """The edits, in their order: each of its own type, as each renders the prompt."""

    edits: Annotated[list[AnyEdit], ItemLimit] = Field(default_factory=list)

    @model_validator(mode="after")
    def _types_differ(self) -> Self:
        seen: set[str] = set()
        for index, edit in enumerate(self.edits):
            if edit.type in seen:
                raise invalid_value(
                    f"there are two of {short_json(edit.type)}", f"edits[{index}].type"
                )
            seen.add(edit.type)
        return self


@frozen
class EditedConversation:
    """A conversation after all edits."""

    ids: list[int]
    original_tokens: int
    applied: list[dict[str, Any]]  # as the answer reports them


def edit_conversation(
    turns: Sequence[EditedTurn],
    edits: Sequence[Edit],
    render: Callable[[Sequence[EditedTurn]], list[int]],
) -> EditedConversation:
    """Apply edits to turns that `render` makes into token ids."""
    ids = render(turns)
    num_original = len(ids)
    applied: list[dict[str, Any]] = []
    for edit in edits:
        edited = edit.apply(turns, len(ids))
        if not edited.number:
            continue
        shorter_ids = render(edited.turns)
        if len(ids) - len(shorter_ids) < edit.min_cleared_tokens:
            continue
        applied.append(
            {
                "type": edit.type,
                edit.counted: edited.number,
                "cleared_input_tokens": max(0, len(ids) - len(shorter_ids)),
            }
        )
        turns, ids = edited.turns, shorter_ids
    return EditedConversation(ids, num_original, applied)


def _blocks(turns: Sequence[EditedTurn]) -> list[ContentBlock]:
    return [
        block
        for turn in turns
        if not isinstance(turn.content, str)
        for block in turn.content
    ]


def _is_thinking(block: object) -> bool:
    return isinstance(block, ThinkingBlock | RedactedThinkingBlock)
