"""Probes of a chat template: conversations that are rendered to find what it shows.

Callers cache results by the probe, which is equal for equal templates: a template is
probed once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.template_messages import Message, message_forms
from minfer.effects.text.template_rendering import ChatTemplateError, render_template

_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "probe of a tool",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


@frozen
class TemplateProbe:
    """A template that is probed, with or without tools."""

    template: str
    tokens: tuple[tuple[str, str], ...]  # special tokens by name
    tools: bool = False

    def text(
        self, chat: Sequence[Message], values: Mapping[str, Any] | None = None
    ) -> str | None:
        """The rendered conversation; None if the template refuses it."""
        variables = {
            "tools": [_TOOL] if self.tools else None,
            "documents": None,
            "add_generation_prompt": True,
            **(values or {}),
        }
        for form in message_forms(chat):
            try:
                return render_template(self.template, form, dict(self.tokens), variables)
            except ChatTemplateError:
                continue
        return None

    def shows(self, chat: Sequence[Message]) -> bool:
        """Whether the texts of a conversation are shown, in order."""
        text = self.text(chat)
        if text is None:
            return False
        end = 0
        for message in chat:
            content = message["content"]
            start = text.find(content, end)
            if start < 0:
                return False
            end = start + len(content)
        return True
