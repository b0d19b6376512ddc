"""Probes of a chat template: conversations that are rendered to find what it shows.

Callers cache results by the probe, which is equal for equal templates: a template is
probed once.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from minfer.effects.text.template_cache import cached_by_template
from minfer.effects.text.template_messages import (
    Message,
    in_list,
    list_probe,
    message_forms,
    shows_text,
    shows_texts,
    text_probe,
)
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

    @property
    def variables(self) -> dict[str, Any]:
        """What a template gets besides messages and tokens."""
        return {
            "tools": [_TOOL] if self.tools else None,
            "documents": None,
            "add_generation_prompt": True,
        }

    def text(
        self, chat: Sequence[Message], values: Mapping[str, Any] | None = None
    ) -> str | None:
        """The rendered conversation; None if the template refuses it."""
        variables = {**self.variables, **(values or {})}
        for form in message_forms(chat):
            try:
                return self.render(form, variables)
            except ChatTemplateError:
                continue
        return None

    def render(self, form: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The rendered messages, their texts as lists where the template reads no others.
        Raises ChatTemplateError.
        """
        messages = [
            in_list(message)
            if reads_lists_alone(self, str(message.get("role")))
            else message
            for message in form
        ]
        return render_template(self.template, messages, dict(self.tokens), variables)

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


@cached_by_template
def reads_lists_alone(probe: TemplateProbe, role: str) -> bool:
    """Whether a template shows the texts of a role's messages in lists alone, as those of
    multimodal models do that loop over images and texts. Of a text it shows nothing then,
    without an error.
    """

    def rendered(chat: list[Message]) -> str:
        try:
            return render_template(
                probe.template, chat, dict(probe.tokens), probe.variables
            )
        except ChatTemplateError:
            return ""

    if shows_text(rendered(text_probe(role))):
        return False
    return shows_texts(rendered(list_probe(role)))
