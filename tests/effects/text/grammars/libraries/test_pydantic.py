"""Every type of pydantic 2: accepted, or refused by name; and values that hold."""

import json
import warnings
from random import Random
from typing import Any, Final

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema

from tests.circles import claimed, long
from tests.effects.text.grammars.bundled import refusal
from tests.effects.text.grammars.libraries.pydantic_types import TYPES, model_of
from tests.effects.text.grammars.random_texts import Sampler, matcher

# Of which pydantic itself makes no schema here.
NO_SCHEMA: Final = frozenset({"Callable"})
NEEDS_EMAIL_VALIDATOR: Final = frozenset({"EmailStr", "NameEmail"})
# The keyword that cannot be enforced.
REFUSED: Final = dict.fromkeys(("frozenset", "set", "set_literal"), "uniqueItems")
_SCHEME: Final = "the schema does not say which schemes the parser takes"
_FILE: Final = "the parser asks the file system"
_TIME: Final = "the parser asks the clock"
# Types whose parser refuses what their schema allows, which no grammar can know.
STRICTER_PARSER: Final = {
    **dict.fromkeys(("AmqpDsn", "AnyHttpUrl", "AnyWebsocketUrl"), _SCHEME),
    **dict.fromkeys(("ClickHouseDsn", "CockroachDsn", "FileUrl", "FtpUrl"), _SCHEME),
    **dict.fromkeys(("HttpUrl", "KafkaDsn", "MariaDBDsn", "MongoDsn"), _SCHEME),
    **dict.fromkeys(("MySQLDsn", "NatsDsn", "PostgresDsn", "RedisDsn"), _SCHEME),
    **dict.fromkeys(("SnowflakeDsn", "WebsocketUrl"), _SCHEME),
    **dict.fromkeys(("DirectoryPath", "FilePath", "NewPath", "SocketPath"), _FILE),
    **dict.fromkeys(("FutureDate", "FutureDatetime", "PastDate", "PastDatetime"), _TIME),
    "Annotated_Predicate": "the schema does not say what the predicate does",
    "Base64Str": "the bytes must be UTF-8, which an encoding of three bytes hides",
    "Base64UrlStr": "as Base64Str",
    "ByteSize": "the schema does not say what a text must be",
    "Decimal": "the schema does not say what a text must be",
    "Decimal_places": "as Decimal",
    "EmailStr": "email-validator knows which domains cannot exist",
    "ImportString": "the parser imports a module",
    "Json": "JSON within a text is no regular language",
    "Json_of": "as Json",
    "NaiveDatetime": "the schema's format has a time zone, which the parser refuses",
    "NameEmail": "as EmailStr",
    "Pattern": "regular expressions are no regular language",
    "PaymentCardNumber": "the schema does not say that these are digits, with a sum",
    "bytes_bounded": "the schema counts characters, and the parser bytes",
    "complex": "the schema does not say what a text must be",
    "dict_int": "the schema does not say that names are numbers",
    "dict_pattern": "the schema says nothing of names that do not match the pattern",
    "type": "the parser takes no type from JSON",
}


def schema_of(name: str) -> tuple[type[BaseModel], dict[str, Any]]:
    """A type's model and its schema; skips types that have none."""
    if name in NEEDS_EMAIL_VALIDATOR:
        pytest.importorskip("email_validator")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that JSON cannot have
        model = model_of(TYPES[name])
        if name in NO_SCHEMA:
            with pytest.raises(PydanticInvalidForJsonSchema):
                model.model_json_schema()
            pytest.skip("pydantic makes no schema of it")
        return model, model.model_json_schema()


def parse_error(model: type[BaseModel], value: Any) -> str:
    """Why pydantic refuses a value; empty if it takes it."""
    try:
        model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        return str(error)
    return ""


def check(name: str, count: int) -> None:
    """Check what a type's schema allows, with so many values."""
    model, schema = schema_of(name)
    if name in REFUSED:
        error = refusal(json=schema)
        assert f"the keyword {REFUSED[name]!r} cannot be enforced; " in str(error)
        assert "(at /properties/value)" in str(error)
        return
    reference = jsonschema.Draft202012Validator(schema)
    sampler = Sampler(matcher(schema), Random(name))
    for _ in range(count):
        value = sampler.value()
        reference.validate(value)
        if name not in STRICTER_PARSER:
            assert not parse_error(model, value), value


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_refused_by_name_or_its_values_hold(name: str) -> None:
    check(name, 3)


@pytest.mark.parametrize("count", [*long([20]), *claimed([200])])
@pytest.mark.parametrize("name", TYPES)
def test_values_of_a_type_hold(name: str, count: int) -> None:
    check(name, count)
