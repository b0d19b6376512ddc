"""Conversations of Anthropic's API: a system prompt, and turns of blocks.

As in that API, successive turns of one role are one, and the answer continues a last turn
of the assistant.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from minfer.effects.live.input_processing.input_processor import MAX_CLIENT_CHARS
from minfer.effects.serving.anthropic.blocks import (
    ContentBlock,
    MessageContent,
    RedactedThinkingBlock,
    TemplateMessage,
    ToolChangeBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    check_role,
    turns_of,
)
from minfer.effects.serving.anthropic.context_edits import (
    ContextManagement,
    EditedConversation,
    EditedTurn,
    edit_conversation,
)
from minfer.effects.serving.anthropic.documents import ItemLimit, TextBlock, TextContent
from minfer.effects.serving.anthropic.thinking import (
    AnthropicEffort,
    OutputConfig,
    ThinkingConfig,
    TurnOutputConfig,
    template_variables,
)
from minfer.effects.serving.anthropic.tools import (
    AnthropicTool,
    AnthropicToolChoice,
    Tool,
    callable_tools,
    check_choice,
    prompt_tools,
)
from minfer.effects.serving.protocol import ModelInfo
from minfer.effects.serving.request_parsing.answer_parsing import check_template
from minfer.effects.serving.request_parsing.bodies import (
    HINT,
    StrictObject,
    invalid_value,
)
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.tool_constraints import OfferedTool
from minfer.effects.serving.request_parsing.typed_objects import template_content
from minfer.effects.text.tools.formats import NONE

# Fields that are not supported, with the values at which they change nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "billing_policy": (HINT,),
    "cache_control": (HINT,),  # prefixes are cached anyway
    "compaction": (),
    "container": (),
    "diagnostics": (HINT,),
    "fallback_credit_token": (HINT,),
    "fallbacks": ([], HINT),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only", HINT),
    "speed": ("standard", HINT),
    "thread": (),
    "user_profile_id": (HINT,),
    "workspace_id": (HINT,),
}
# Claude Code's first system block. It differs in each session or request, which would
# cost the prefix cache, and is about billing.
BILLING_PREFIX: Final = "x-anthropic-billing-header:"


class MessageTurn(StrictObject):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: MessageContent
    # Of system messages:
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: TurnOutputConfig | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        check_role(self.role, self.content)
        for name in ("clear_at", "output_config"):
            if self.role != "system" and getattr(self, name) is not None:
                raise invalid_value("is of system messages; leave it out", name)
        return self


class RequestMetadata(StrictObject):
    """The user of a request."""

    user_id: Annotated[str, Field(max_length=MAX_CLIENT_CHARS)] = ""


class ConversationBody(StrictObject):
    """The fields of a conversation, whether it is answered or counted."""

    neutral = _NEUTRAL
    model: str | None = None
    system: TextContent | None = None
    messages: Annotated[list[MessageTurn], ItemLimit, Field(min_length=1)]
    tools: Annotated[list[Tool], ItemLimit] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    betas: Annotated[list[str], ItemLimit] | None = None

    @model_validator(mode="after")
    def _choice_fits(self) -> Self:
        check_choice(self.tools or (), self.tool_choice)
        return self

    @model_validator(mode="after")
    def _references_fit(self) -> Self:
        """Refuse results without a call, and references to tools that are not there."""
        calls: set[str] = set()
        last_role = ""
        names = {
            tool.name for tool in self.tools or () if isinstance(tool, AnthropicTool)
        }
        for index, message in enumerate(self.messages):
            if message.role == "assistant" and last_role != "assistant":
                calls = set()
            if message.role != "system":
                last_role = message.role
            for place, block in enumerate(blocks_of(message.content)):
                field_path = f"messages[{index}].content[{place}]"
                if isinstance(block, ToolUseBlock):
                    calls.add(block.id)
                elif (
                    isinstance(block, ToolResultBlock) and block.tool_use_id not in calls
                ):
                    raise invalid_value(
                        _orphan_message(block), f"{field_path}.tool_use_id"
                    )
                for name in referenced_tools(block):
                    if name not in names:
                        raise invalid_value(
                            f"there is no tool {json.dumps(name)} in tools", field_path
                        )
        return self

    @model_validator(mode="after")
    def _choice_remains(self) -> Self:
        """Refuse a required call of tools that a message has removed."""
        choice = self.tool_choice
        if choice is None or not choice.requirements().required:
            return self
        removed = {name for name, offered in self._tool_changes.items() if not offered}
        names = {tool.name for tool in self._tools if isinstance(tool, AnthropicTool)}
        if choice.name in removed:
            reason = f"the tool {json.dumps(choice.name)} was removed by a tool_removal"
            raise invalid_value(f"{reason}; name another one", "tool_choice.name")
        if names <= removed:
            raise invalid_value(
                "needs a tool that no tool_removal has removed", "tool_choice"
            )
        return self

    @property
    def _tools(self) -> list[AnthropicTool | Any]:
        none = self.tool_choice is not None and self.tool_choice.type == "none"
        return [] if none else self.tools or []

    @property
    def offered(self) -> list[AnthropicTool]:
        """The tools at the beginning of the prompt."""
        return prompt_tools(self._tools)

    @property
    def offers(self) -> list[OfferedTool]:
        """The tools that the model may call."""
        return callable_tools(self._tools, self._tool_changes, self.tool_choice)

    @property
    def _tool_changes(self) -> dict[str, bool]:
        """Whether each tool that a message adds, removes or refers to is offered after
        the last message.
        """
        changes: dict[str, bool] = {}
        for message in self.messages:
            for block in blocks_of(message.content):
                for name in referenced_tools(block):
                    changes[name] = block.type != "tool_removal"
        return changes

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

    def render_edited(self, llm: ModelInfo) -> EditedConversation:
        """The conversation as token ids, up to where the answer begins, after the edits
        of `context_management`. Raises ChatTemplateError, RequestError and ApiError.
        """
        if self.betas:
            note_ignored("betas")
        offered = self.offered
        variables = template_variables(
            llm.tokenizer,
            self.thinking,
            self._effort,
            tools=bool(offered),
            reasons=llm.parsers.reasoning != NONE,
        )
        tools = [tool.to_json() for tool in offered] or None

        def render(turns: Sequence[EditedTurn]) -> list[int]:
            return self._render(llm, turns, tools, variables)

        edits = self.context_management.edits if self.context_management else ()
        return edit_conversation(list(self._turns()), edits, render)

    @property
    def _effort(self) -> AnthropicEffort | None:
        """The effort: that of the last system message that has one, or the request's."""
        configs = [
            self.output_config,
            *(message.output_config for message in self.messages),
        ]
        efforts = [
            config.effort for config in configs if config is not None and config.effort
        ]
        return efforts[-1] if efforts else None

    def _turns(self) -> Iterator[EditedTurn]:
        """The turns that the model reads, with the texts of the tools that they name."""
        tools = {
            tool.name: tool for tool in self._tools if isinstance(tool, AnthropicTool)
        }
        users = [
            index for index, message in enumerate(self.messages) if message.role == "user"
        ]
        for index, message in enumerate(self.messages):
            is_over = users and index < users[-1]
            if message.clear_at == "next_user_message" and is_over:
                continue
            content = message.content
            if not isinstance(content, str):
                content = [_with_tool_texts(block, tools) for block in content]
            yield EditedTurn(message.role, content)

    def _render(
        self,
        llm: ModelInfo,
        edited: Sequence[EditedTurn],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> list[int]:
        system = _system_content(self.system or "")
        turns: list[TemplateMessage] = (
            [{"role": "system", "content": system}] if system else []
        )
        for role, role_turns in groupby(edited, key=lambda turn: turn.role):
            turns += turns_of(role, [turn.content for turn in role_turns])
        if tools:
            check_template(llm.parsers, "tools")
        elif any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            check_template(llm.parsers, "messages")
        # After a call the answer is a turn of its own.
        continues = turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]
        return llm.render(
            turns,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            chat_template_kwargs=variables,
        )


def referenced_tools(block: ContentBlock) -> Iterator[str]:
    """The names of the tools that a block makes known."""
    if isinstance(block, ToolChangeBlock):
        yield block.tool.name
    elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
        for content_part in block.content:
            if isinstance(content_part, ToolReferenceBlock):
                yield content_part.tool_name


def _with_tool_texts(
    block: ContentBlock, tools: Mapping[str, AnthropicTool]
) -> ContentBlock:
    """A block in which tools that it names are described."""
    if isinstance(block, RedactedThinkingBlock):
        note_ignored("redacted_thinking")
    if isinstance(block, ToolChangeBlock):
        name = block.tool.name
        text = f"The tool {name} is no longer available."
        if block.type == "tool_addition":
            text = _functions([tools[name]]) if name in tools else ""
        return TextBlock(type="text", text=text)
    if not isinstance(block, ToolResultBlock) or not isinstance(block.content, list):
        return block
    content: list[Any] = []
    for is_reference, content_parts in groupby(
        block.content,
        key=lambda part: isinstance(part, ToolReferenceBlock),
    ):
        if not is_reference:
            content += content_parts
            continue
        names = [
            content_part.tool_name
            for content_part in content_parts
            if isinstance(content_part, ToolReferenceBlock)
        ]
        referenced = [tools[name] for name in names if name in tools]
        content.append(TextBlock(type="text", text=_functions(referenced)))
    return block.model_copy(update={"content": content})


def _functions(tools: Sequence[AnthropicTool]) -> str:
    lines = ["<functions>", *(tool.text for tool in tools), "</functions>"]
    return "\n".join(lines)


def _system_content(system: str | Sequence[TextBlock]) -> str | list[dict[str, str]]:
    """The system prompt for chat templates, without Claude Code's line about billing."""
    if isinstance(system, str):
        return system
    if system and system[0].text.startswith(BILLING_PREFIX):
        system = system[1:]
    return template_content(system)


def _orphan_message(block: ToolResultBlock) -> str:
    """The error about a result without a call, in the words of Anthropic's API."""
    return (
        f"unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id}. "
        f"Each `tool_result` block must have a corresponding `tool_use` block in the "
        f"previous message."
    )
