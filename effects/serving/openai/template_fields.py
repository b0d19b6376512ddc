"""Fields of requests that are variables of the chat template."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.protocol import ModelInfo
from minfer.effects.serving.request_parsing.bodies import invalid_value
from minfer.effects.text.chat_templates import ChatTemplateError, Conversation
from minfer.lifecycle.arrive import longest_prompt

MAX_TEMPLATE_BYTES: Final = 2**16
_FIELD: Final = "chat_template"

# OpenAI's values, and "max", which vLLM and DeepSeek's templates know.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def template_kwargs(
    requested: Mapping[str, Any] | None,
    effort: Effort | None,
    verbosity: Verbosity | None,
) -> dict[str, Any]:
    """The template's variables: those `requested`, and those that follow from fields.

    As in vLLM, an effort sets `reasoning_effort`, and `enable_thinking` where that is not
    given. A template that reads none of these is not changed by them.
    """
    variables = dict(requested or {})
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    if verbosity is not None:
        variables["verbosity"] = verbosity
    return variables


def _check_size(template: str) -> str:
    size = len(template.encode("utf-8", "surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise invalid_value(f"must have at most {MAX_TEMPLATE_BYTES} bytes, not {size}")
    return template


def check_prompt(ids: Sequence[int], llm: ModelInfo) -> None:
    """Raise ApiError for a prompt of the request's own template that cannot be served."""
    if not ids:
        raise ApiError(f"{_FIELD}: writes no text; write a prompt with it", _FIELD)
    context = llm.setup.config.max_model_len
    if len(ids) > longest_prompt(context, output=True):
        reason = f"{_FIELD}: This model's maximum context length is {context} tokens. It"
        raise ApiError(
            f"{reason} writes {len(ids)} of these messages; shorten one", _FIELD
        )


RequestTemplate = Annotated[str, AfterValidator(_check_size)]


def render(
    llm: ModelInfo, template: str | None, messages: Conversation, **options: Any
) -> list[int]:
    """Token ids of a conversation, through the request's own template if it has one.
    Raises as `ModelInfo.render`, and ApiError for the request's template.
    """
    if template is None:
        return llm.render(messages, **options)
    try:
        return llm.with_request_template(template).render(messages, **options)
    except ChatTemplateError as error:
        raise ApiError(f"{_FIELD}: {error}", _FIELD) from error
