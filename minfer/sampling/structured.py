"""The constraint of an output that a client requested, as data.

It is sent with its request into the engine and into journals, where it need not be
interpreted: the tokens it allowed are recorded. Masks are made from it in
`minfer.effects.text.grammars`.
"""

import json as json_text
from collections.abc import Iterable, Mapping
from typing import Any, Final

from attrs import field, frozen

from minfer.sampling.vllm_names import STRUCTURED, takes_neutral
from minfer.values.checks import ParameterError

MAX_CONSTRAINT: Final = 2**16  # characters
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
FIELD: Final = "structured_outputs"
_SCHEMA: Final = "an object, true or false, as it is or as text"


def _as_json(value: Any) -> Any:
    """A schema as JSON text; the order of its properties counts."""
    if not isinstance(value, Mapping | bool):
        return value
    try:
        return json_text.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(FIELD, f"is not JSON: {error}") from None


def _as_tuple(value: Any) -> Any:
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return tuple(value) if is_list else value


def _as_flag(value: Any) -> Any:
    return False if value is None else value


@takes_neutral(STRUCTURED)
@frozen(kw_only=True)
class StructuredOutputs:
    """One constraint, in the names of vLLM's `StructuredOutputsParams`. Raises
    ParameterError unless there is exactly one.
    """

    # A JSON schema, as text or as a value.
    json: str | None = field(default=None, converter=_as_json)
    regex: str | None = None  # that matches the whole output
    choice: tuple[str, ...] | None = field(default=None, converter=_as_tuple)
    grammar: str | None = None  # Lark's, or llama.cpp's (GBNF)
    json_object: bool = field(default=False, converter=_as_flag)  # any object
    # Free text with tags, after which the text follows their schemas; as `json`.
    structural_tag: str | None = field(default=None, converter=_as_json)
    disable_any_whitespace: bool = False  # between the tokens of JSON

    def __attrs_post_init__(self) -> None:
        kinds = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(kinds) != 1:
            names = " and ".join(kinds) or "nothing"
            raise ParameterError(
                FIELD, f"must have one of {', '.join(KINDS)}; it has {names}"
            )
        for name in ("json", "structural_tag"):
            _check_text(name, getattr(self, name), _SCHEMA)
        for name in ("regex", "grammar"):
            _check_text(name, getattr(self, name), "a text that is not empty")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{FIELD}.{name}", "must be true or false")
        self._check_choice(self.choice)
        if len(self.text) > MAX_CONSTRAINT:
            message = f"has {len(self.text)} characters, of at most {MAX_CONSTRAINT}"
            raise ParameterError(self.param, f"{message}; make it smaller")

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def param(self) -> str:
        """The field with the constraint, as errors name it."""
        return f"{FIELD}.{self.kind}"

    @property
    def text(self) -> str:
        """The constraint as one text."""
        constraint = getattr(self, self.kind)
        return "\n".join(constraint) if isinstance(constraint, tuple) else str(constraint)

    def _check_choice(self, value: Any) -> None:
        if value is None:
            return
        is_texts = type(value) is tuple and set(map(type, value)) == {str}
        if not is_texts or not all(value):
            raise ParameterError(
                f"{FIELD}.choice", "must be a list of texts that are not empty"
            )
        for text in value:
            _check_text("choice", text, "texts")


def _check_text(name: str, value: Any, kind: str) -> None:
    """Raise ParameterError unless it is text that can be encoded, or absent."""
    if value is None:
        return
    if type(value) is not str or not value:
        raise ParameterError(f"{FIELD}.{name}", f"must be {kind}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            message = "has half of a surrogate pair, which is no character"
            raise ParameterError(f"{FIELD}.{name}", message) from None
