"""Fields of Anthropic's API for how the model thinks, and for its output."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from minfer.effects.serving.request_parsing.bodies import (
    HINT,
    StrictObject,
    invalid_value,
    short_json,
)
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.structured_fields import Constraint
from minfer.effects.serving.request_parsing.typed_objects import TypedObject
from minfer.effects.text.template_switches import template_switches
from minfer.effects.text.tokenizer import Tokenizer

AnthropicEffort = Literal["low", "medium", "high", "xhigh", "max"]
# The effort for a budget of at least as many tokens, as litellm maps them.
_EFFORT_BY_BUDGET: Final[Mapping[int, AnthropicEffort]] = {4096: "high", 2048: "medium"}
_MAX_NAME_CHARS: Final = 64  # of a name in an error
_MIN_BUDGET: Final = 1024  # tokens, as in Anthropic's API


class ThinkingConfig(TypedObject):
    """Whether the model thinks before it answers."""

    kinds = ("adaptive", "enabled", "disabled")
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"block_binding": ({}, HINT)}
    budget_tokens: Annotated[int, Field(ge=_MIN_BUDGET, lt=2**31)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None

    @model_validator(mode="after")
    def _budget_fits(self) -> Self:
        if (self.budget_tokens is None) == (self.type == "enabled"):
            message = "is missing" if self.type == "enabled" else "needs the type enabled"
            raise invalid_value(message, "budget_tokens")
        return self

    @property
    def effort(self) -> AnthropicEffort | None:
        """The effort for the budget, if there is one."""
        if self.budget_tokens is None:
            return None
        for budget, effort in _EFFORT_BY_BUDGET.items():
            if self.budget_tokens >= budget:
                return effort
        return "low"

    def note_hints(self) -> None:
        """Note fields without effect: reasoning is sent whole, and not cut off."""
        if self.display not in (None, "summarized"):
            note_ignored("thinking.display")
        if self.budget_tokens is not None:
            note_ignored("thinking.budget_tokens")


def _check_format(value: dict[str, Any]) -> dict[str, Any]:
    """The form of an answer, `{"type": "json_schema", "schema": {...}}`. It is no model
    of pydantic's, for which the name `schema` is taken.
    """
    if value.get("type") != "json_schema":
        supported = 'there is "json_schema"'
        raise invalid_value(
            f"{short_json(value.get('type'))} is not supported; {supported}", "type"
        )
    if not isinstance(value.get("schema"), dict):
        raise invalid_value("must be an object", "schema")
    for name in value:
        if name not in ("type", "schema"):
            raise invalid_value(
                "is not a field here; leave it out", name[:_MAX_NAME_CHARS]
            )
    return value


class TurnOutputConfig(StrictObject):
    """The effort from a system message on."""

    effort: AnthropicEffort | None = None


class OutputConfig(TurnOutputConfig):
    """The effort and the form of an answer."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": (HINT,)}
    format: Annotated[dict[str, Any], AfterValidator(_check_format)] | None = None

    def constraint(self) -> Constraint | None:
        """The constraint of the format, if there is one."""
        if self.format is None:
            return None
        return Constraint({"json": self.format["schema"]}, "output_config.format.schema")


def template_variables(
    tokenizer: Tokenizer | None,
    thinking: ThinkingConfig | None,
    effort: AnthropicEffort | None,
    *,
    tools: bool,
    reasons: bool,
) -> dict[str, Any]:
    """The chat template's variables for thinking and effort. `reasons`: the model is
    known to think. Fields that change nothing with this template are noted.
    """
    if tokenizer is None or (thinking is None and effort is None):
        return {}
    switches = template_switches(tokenizer, tools=tools)
    variables: dict[str, Any] = {}
    if thinking is not None:
        thinking.note_hints()
        thinking_variables = switches.on if thinking.type != "disabled" else switches.off
        variables |= thinking_variables or {}
        if thinking_variables is None and (reasons or thinking.type != "disabled"):
            note_ignored("thinking")
    requested = effort or (thinking.effort if thinking is not None else None)
    if requested is not None:
        effort_variables = switches.efforts.get(requested)
        if effort_variables is None and effort is not None:
            note_ignored("output_config.effort")
        variables |= effort_variables or {}
    return variables
