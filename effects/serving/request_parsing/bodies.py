"""Bodies of requests: JSON objects whose fields are checked before anything runs.

Every error names its field. A known but unsupported field is refused if it could change
the output, and ignored if not; hints that are ignored are reported (`ignored_hints`).
Null means absent.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from minfer.effects.serving.client_errors import ApiError
from minfer.effects.serving.request_parsing.ignored_hints import note_ignored
from minfer.effects.serving.request_parsing.validation_errors import describe_error
from minfer.effects.setup.nearest import nearest

ANYTHING: Final = object()  # among a field's neutral values: all of them are
HINT: Final = object()  # likewise, but other values than the neutral ones are reported
_MAX_NAME_CHARS: Final = 64  # of a name that an error shows
# The parser's names for a lone surrogate, within a text and at its end.
_SURROGATE_ERRORS: Final = ("surrogate", "unexpected end of hex escape")
_MAX_VALUE_CHARS: Final = 80  # of a value as JSON


def invalid_value(message: str, field: str | None = None) -> PydanticCustomError:
    """An error about a value, or about a field of it; to be raised in a validator."""
    return PydanticCustomError("wrong", "{reason}", {"reason": message, "field": field})


def short_json(value: object) -> str:
    """A value as JSON, cut to what fits into an error."""
    return json.dumps(value)[:_MAX_VALUE_CHARS]


class StrictObject(BaseModel):
    """A JSON object: strict types, finite numbers, known fields.

    `neutral` are fields that are known and not supported, with the values at which they
    change nothing. Other values are refused, unless the field is a `HINT`.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        """Refuse the first field that is unknown or unsupported: there may be a million
        of them.
        """
        if not isinstance(data, dict):
            raise invalid_value("must be an object")
        fields = cls.model_fields  # a property, which takes a while
        for name, value in data.items():
            if name in fields:
                continue
            if name not in cls.neutral:
                cut = name[:_MAX_NAME_CHARS]
                similar = nearest(cut, [*fields, *cls.neutral])
                hint = f"did you mean {similar}?" if similar else "leave it out"
                raise invalid_value(f"is not a field here; {hint}", cut)
            if _is_neutral(value, cls.neutral[name]):
                continue
            if HINT not in cls.neutral[name]:
                raise invalid_value("is not supported; leave it out", name)
            note_ignored(name)
        return {k: v for k, v in data.items() if v is not None and k in fields}


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if ANYTHING in neutral:
        return True
    # False equals 0 in Python, but not in JSON.
    candidates = [
        (candidate, isinstance(candidate, bool)) for candidate in (None, *neutral)
    ]
    return (value, isinstance(value, bool)) in candidates


BodyModel = TypeVar("BodyModel", bound=BaseModel)


def read_body(kind: type[BodyModel], data: bytes) -> BodyModel:
    """The object in a body. Raises ApiError, which names the field."""
    try:
        parsed = from_json(data, allow_inf_nan=False, cache_strings="none")
        return kind.model_validate(parsed)
    except ValidationError as error:
        raise _field_error(error.errors(include_url=False)[0]) from None
    except ValueError as error:
        raise ApiError(invalid_json_message("the body", error)) from None


def invalid_json_message(subject: str, error: ValueError) -> str:
    """The error of a text that is no JSON."""
    if not any(marker in str(error) for marker in _SURROGATE_ERRORS):
        return f"{subject} is not valid JSON: {error}"
    reason = f"{subject} has a lone surrogate, which is half of a character: {error}"
    return f"{reason}; remove it, or send both halves"


def _field_error(first: ErrorDetails) -> ApiError:
    """The first of pydantic's errors in our words."""
    field = first.get("ctx", {}).get("field")
    place = [*first["loc"], *([] if field is None else [field])]
    dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    field_path = dotted.removeprefix(".")
    message = describe_error(first)
    return ApiError(f"{field_path or 'the body'}: {message}", field_path or None)
