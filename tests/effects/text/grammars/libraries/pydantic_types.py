"""The types of pydantic 2, each as the one field of a model."""

import ipaddress
import re
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, IntFlag, StrEnum
from fractions import Fraction
from pathlib import Path, PurePath
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Optional,
    TypeVar,
    Union,
)

import annotated_types
import pydantic
from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag
from pydantic.dataclasses import dataclass
from pydantic.types import PaymentCardNumber
from typing_extensions import TypeAliasType, TypedDict

T = TypeVar("T")


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Bits(IntFlag):
    READ = 1
    WRITE = 2


class Mixed(Enum):
    TEXT = "a"
    NUMBER = 1


class Point(BaseModel):
    x: int
    y: float = 0.0


class ClosedPoint(BaseModel):
    model_config = ConfigDict(extra="forbid")
    x: int


class OpenPoint(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    x: int


class Tree(BaseModel):
    name: str
    children: list["Tree"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    barks: bool


class Box(BaseModel, Generic[T]):
    content: T


class Pair(NamedTuple):
    left: int
    right: str = "b"


class Movie(TypedDict, total=False):
    title: str
    year: int


@dataclass
class Circle:
    radius: float
    name: str = "c"


class Numbers(RootModel[list[int]]):
    pass


class Computed(BaseModel):
    width: int

    @pydantic.computed_field
    def area(self) -> int:
        return self.width**2


class Aliased(BaseModel):
    user_name: str = Field(alias="userName")


Names = TypeAliasType("Names", list[str])


def _kind(value: Any) -> str:
    return "text" if isinstance(value, str) else "number"


TYPES: Final[dict[str, Any]] = {
    "Any": Any,
    "AliasedModel": Aliased,
    "AmqpDsn": pydantic.AmqpDsn,
    "Annotated_Predicate": Annotated[str, annotated_types.Predicate(str.islower)],
    "AnyHttpUrl": pydantic.AnyHttpUrl,
    "AnyUrl": pydantic.AnyUrl,
    "AnyWebsocketUrl": pydantic.AnyWebsocketUrl,
    "AwareDatetime": pydantic.AwareDatetime,
    "Base64Bytes": pydantic.Base64Bytes,
    "Base64Str": pydantic.Base64Str,
    "Base64UrlBytes": pydantic.Base64UrlBytes,
    "Base64UrlStr": pydantic.Base64UrlStr,
    "BaseModel": Point,
    "BaseModel_allow": OpenPoint,
    "BaseModel_forbid": ClosedPoint,
    "BaseModel_generic": Box[int],
    "BaseModel_recursive": Tree,
    "ByteSize": pydantic.ByteSize,
    "Callable": Callable[[int], int],
    "ClickHouseDsn": pydantic.ClickHouseDsn,
    "CockroachDsn": pydantic.CockroachDsn,
    "Computed": Computed,
    "Counter": Counter[str],
    "Decimal": Decimal,
    "Decimal_places": Annotated[Decimal, Field(max_digits=6, decimal_places=2)],
    "DirectoryPath": pydantic.DirectoryPath,
    "EmailStr": pydantic.EmailStr,
    "Enum": Color,
    "Enum_int": Level,
    "Enum_flag": Bits,
    "Enum_mixed": Mixed,
    "FailFast": Annotated[list[int], pydantic.FailFast()],
    "FileUrl": pydantic.FileUrl,
    "FilePath": pydantic.FilePath,
    "FiniteFloat": pydantic.FiniteFloat,
    "Fraction": Fraction,
    "FtpUrl": pydantic.FtpUrl,
    "FutureDate": pydantic.FutureDate,
    "FutureDatetime": pydantic.FutureDatetime,
    "HttpUrl": pydantic.HttpUrl,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv6Interface": ipaddress.IPv6Interface,
    "IPv6Network": ipaddress.IPv6Network,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPvAnyInterface": pydantic.IPvAnyInterface,
    "IPvAnyNetwork": pydantic.IPvAnyNetwork,
    "ImportString": pydantic.ImportString,
    "InstanceOf": pydantic.InstanceOf[Point],
    "Iterable": Iterable[int],
    "Json": pydantic.Json,
    "Json_of": pydantic.Json[list[int]],
    "JsonValue": pydantic.JsonValue,
    "KafkaDsn": pydantic.KafkaDsn,
    "Literal": Literal["a", "b"],
    "Literal_one": Literal["a"],
    "Literal_mixed": Literal["a", 1, True] | None,
    "Mapping": Mapping[str, int],
    "MariaDBDsn": pydantic.MariaDBDsn,
    "MISSING": int | pydantic.MISSING,
    "MongoDsn": pydantic.MongoDsn,
    "MySQLDsn": pydantic.MySQLDsn,
    "NaiveDatetime": pydantic.NaiveDatetime,
    "NameEmail": pydantic.NameEmail,
    "NamedTuple": Pair,
    "NatsDsn": pydantic.NatsDsn,
    "NegativeFloat": pydantic.NegativeFloat,
    "NegativeInt": pydantic.NegativeInt,
    "NewPath": pydantic.NewPath,
    "NonNegativeFloat": pydantic.NonNegativeFloat,
    "NonNegativeInt": pydantic.NonNegativeInt,
    "NonPositiveFloat": pydantic.NonPositiveFloat,
    "NonPositiveInt": pydantic.NonPositiveInt,
    "None": None,
    "OnErrorOmit": list[pydantic.OnErrorOmit[int]],
    "Optional": Optional[int],  # noqa: UP045  # as users write it
    "OrderedDict": OrderedDict[str, int],
    "PastDate": pydantic.PastDate,
    "PastDatetime": pydantic.PastDatetime,
    "Path": Path,
    "Pattern": re.Pattern[str],
    "PaymentCardNumber": PaymentCardNumber,
    "PositiveFloat": pydantic.PositiveFloat,
    "PositiveInt": pydantic.PositiveInt,
    "PostgresDsn": pydantic.PostgresDsn,
    "PurePath": PurePath,
    "RedisDsn": pydantic.RedisDsn,
    "RootModel": Numbers,
    "Secret": pydantic.Secret[int],
    "SecretBytes": pydantic.SecretBytes,
    "SecretStr": pydantic.SecretStr,
    "Sequence": Sequence[int],
    "SkipValidation": pydantic.SkipValidation[int],
    "SnowflakeDsn": pydantic.SnowflakeDsn,
    "SocketPath": pydantic.SocketPath,
    "StrictBool": pydantic.StrictBool,
    "StrictBytes": pydantic.StrictBytes,
    "StrictFloat": pydantic.StrictFloat,
    "StrictInt": pydantic.StrictInt,
    "StrictStr": pydantic.StrictStr,
    "TypeAliasType": Names,
    "TypedDict": Movie,
    "UUID": uuid.UUID,
    "UUID1": pydantic.UUID1,
    "UUID3": pydantic.UUID3,
    "UUID4": pydantic.UUID4,
    "UUID5": pydantic.UUID5,
    "UUID6": pydantic.UUID6,
    "UUID7": pydantic.UUID7,
    "UUID8": pydantic.UUID8,
    "Union": Union[int, str],  # noqa: UP007  # as users write it
    "Union_callable": Annotated[
        Annotated[str, Tag("text")] | Annotated[int, Tag("number")], Discriminator(_kind)
    ],
    "Union_discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "Union_models": Cat | Dog,
    "WebsocketUrl": pydantic.WebsocketUrl,
    "bool": bool,
    "bytes": bytes,
    "bytes_bounded": Annotated[bytes, Field(min_length=2, max_length=4)],
    "complex": complex,
    "dataclass": Circle,
    "date": date,
    "datetime": datetime,
    "defaultdict": defaultdict[str, list[int]],
    "deque": deque[int],
    "dict": dict[str, int],
    "dict_any": dict,
    "dict_bounded": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "dict_enum": dict[Color, int],
    "dict_int": dict[int, str],
    "dict_literal": dict[Literal["a", "b"], int],
    "dict_pattern": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "dict_string": dict[Annotated[str, Field(min_length=1, max_length=3)], int],
    "dict_uuid": dict[uuid.UUID, int],
    "float": float,
    "float_bounded": Annotated[float, Field(gt=0.5, le=2.5)],
    "float_multiple": Annotated[float, Field(multiple_of=0.5)],
    "frozenset": frozenset[str],
    "int": int,
    "int_bounded": Annotated[int, Field(ge=1, lt=10)],
    "int_multiple": Annotated[int, Field(multiple_of=3)],
    "list": list[int],
    "list_any": list,
    "list_bounded": Annotated[list[int], Field(min_length=1, max_length=3)],
    "object": object,
    "set": set[int],
    "set_bounded": Annotated[set[int], Field(max_length=1)],
    "set_literal": set[Literal["a", "b", "c"]],
    "str": str,
    "str_bounded": Annotated[str, Field(min_length=2, max_length=5)],
    "str_pattern": Annotated[str, Field(pattern=r"^[a-z]{3}-\d+$")],
    "str_strip": Annotated[str, pydantic.StringConstraints(strip_whitespace=True)],
    "time": time,
    "timedelta": timedelta,
    "tuple": tuple[int, str],
    "tuple_any": tuple,
    "tuple_empty": tuple[()],
    "tuple_rest": tuple[int, ...],
    "type": type[Point],
}


def model_of(kind: Any) -> type[BaseModel]:
    """A model with one field of this type."""
    return pydantic.create_model("Answer", value=(kind, ...))
