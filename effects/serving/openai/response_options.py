"""Fields of a response that are options: objects of them, and sampling parameters."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import model_validator

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.openai.fields import (
    Obfuscation,
    PriorityField,
    RequestId,
    StopStrings,
    WholeNumber,
)
from minfer.effects.serving.openai.template_fields import Effort, Verbosity
from minfer.effects.serving.request_parsing.bodies import StrictObject, short_json
from minfer.effects.serving.request_parsing.structured_fields import (
    Constraint,
    schema_constraint,
)
from minfer.effects.serving.request_parsing.typed_hints import hint

_KINDS: Final = ("text", "json_object", "json_schema")  # of a text's format
_MAX_NAME_CHARS: Final = 64  # of a name in an error
Summary = Literal["auto", "concise", "detailed"]


class TextOptions(StrictObject):
    """The format of the text, and how much of it is requested."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        """The constraint of the format, if any. Raises ApiError."""
        field_path = "text.format"
        content = dict(self.format or {})
        match content.pop("type", "text"):
            case "text" if not content:
                return None
            case "json_object" if not content:
                return Constraint({"json_object": True}, field_path)
            case "json_schema":
                return schema_constraint(content, field_path)
            case str(kind) if kind in _KINDS:
                field = f"{field_path}.{min(content)[:_MAX_NAME_CHARS]}"
                raise ApiError(f"{field}: is not a field here; leave it out", field)
            case kind:
                supported = " or ".join(map(short_json, _KINDS))
                message = f"{short_json(kind)} is not supported; there is {supported}"
                raise ApiError(f"{field_path}.type: {message}", f"{field_path}.type")


class ReasoningOptions(StrictObject):
    """The reasoning effort. Summaries are never written, even if requested."""

    effort: Effort | None = None
    summary: Annotated[Summary | None, hint("reasoning.summary")] = None
    generate_summary: Annotated[Summary | None, hint("reasoning.generate_summary")] = None
    context: Annotated[
        Literal["auto", "current_turn", "all_turns"] | None,
        hint("reasoning.context", "auto"),
    ] = None


class ResponseStreamOptions(StrictObject):
    """A stream is never padded."""

    include_obfuscation: Obfuscation = False


class SampledBody(StrictObject):
    """The fields of a response that are sampling parameters, and others that vLLM has
    beside OpenAI's.
    """

    temperature: float | None = None
    top_p: float | None = None
    # vLLM's:
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: WholeNumber | None = None
    skip_special_tokens: bool | None = None
    stop: StopStrings | None = None
    top_k: WholeNumber | None = None
    cache_salt: str = ""
    priority: PriorityField = 0
    request_id: RequestId = ""

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in SamplingParams."""
        other_fields = {"cache_salt", "priority", "request_id"}
        names = SampledBody.model_fields.keys() - other_fields
        return self.model_dump(include=names, exclude_none=True)
