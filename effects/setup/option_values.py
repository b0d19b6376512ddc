"""Allowed values of settings, and how the command line reads them.

An `OptionKind` is both: a validator of an attrs field, so that a wrong value is refused
whatever its source, and argparse's parameters to make such a value of a word.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import Attribute, field, frozen

from minfer.effects.setup.custom_template import CustomTemplate
from minfer.effects.setup.speculation_settings import speculative_config
from minfer.policies.builtin import policy_named
from minfer.records.policy import Policy
from minfer.values.checks import MAX_INT64, ConfigError, is_number

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)")
_UNITS: Final = " kmgt"  # each a factor of 1,000 or 1,024 more than the one before
AS_FITS: Final = -1  # of `max_model_len`: as many tokens as fit into memory
SHORTEST: Final = 2  # tokens of a context


def read_bytes(text: str) -> int:
    """Returns the bytes of a size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x
    2^30.
    """
    size = _read_size(text)
    if size is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 512M, 2G or 2000000000"
        )
    return size


def read_length(text: str) -> int:
    """Returns a number of tokens as vLLM reads it: 4k is 4,000, 4K is 4,096; "auto" is
    -1.
    """
    if text.strip() in ("auto", str(AS_FITS)):
        return AS_FITS
    length = None if "B" in text else _read_size(text)
    if length is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens; write 4096, 4k (4,000), 4K (4,096) or "
            f"auto"
        )
    return length


def _read_size(text: str) -> int | None:
    """Returns a number with a unit; None: it is none."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return None
    number, unit = found.groups()
    base = 1000 if unit.islower() else 1024
    return int(float(number) * base ** _UNITS.index(unit[:1].lower() or " "))


def _is_length(value: Any) -> bool:
    number = is_number(value, whole=True)
    return value is None or (
        number and (value == AS_FITS or SHORTEST <= value <= MAX_INT64)
    )


def read_json_object(text: str) -> Mapping[str, Any]:
    """Returns the object of a text in JSON. Raises argparse.ArgumentTypeError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object: {text:.80}")
    return value


@frozen
class OptionKind:
    """The allowed values of a setting.

    `wanted` describes them in words, `right` tests a value. `metavar`, `read` and
    `choices` are argparse's: the name in help texts, the function that makes a value of a
    word, and all words, if they are few.
    """

    wanted: str
    right: Callable[[Any], bool]
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None

    def __call__(self, _: object, attribute: "Attribute[Any]", value: object) -> None:
        """Refuse an invalid value of a field. Raises ConfigError."""
        if not self.right(value):
            raise ConfigError(f"{attribute.name} must be {self.wanted}, not {value!r}")


def whole(
    low: int = 1, metavar: str = "N", read: Callable[[str], int] = int
) -> OptionKind:
    """Returns the kind of whole numbers from `low` on, or None."""

    def right(value: Any) -> bool:
        return value is None or (
            is_number(value, whole=True) and low <= value <= MAX_INT64
        )

    return OptionKind(f"a whole number from {low} to 2^63 - 1", right, metavar, read)


def one_of(
    known: tuple[str, ...], metavar: str | None = None, *, optional: bool = False
) -> OptionKind:
    """Returns the kind of a few words, or None if `optional`; help texts list them unless
    there is a `metavar`.
    """

    def fits(value: Any) -> bool:
        return (optional and value is None) or value in known

    choices = None if metavar else known
    return OptionKind(f"one of {', '.join(known)}", fits, metavar, choices=choices)


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 < value <= 1)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path | None)


def _is_template(value: Any) -> bool:
    return isinstance(value, str | Path | CustomTemplate | None)


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def policy_of(wanted: str | Policy) -> Policy:
    """Returns a policy, also by its name. Raises ConfigError."""
    if isinstance(wanted, str):
        return policy_named(wanted)
    if isinstance(wanted, type):
        raise _no_policy(f"{wanted!r} is a class: make one of it")
    for name in vars(Policy):
        if not name.startswith("_") and not hasattr(wanted, name):
            raise _no_policy(f"{wanted!r} lacks {name}")
    return wanted


def _no_policy(why: str) -> ConfigError:
    return ConfigError(f"scheduling_policy must be a name or a policy; {why}")


COUNT: Final = whole()
LENGTH: Final = OptionKind(
    f"a whole number from {SHORTEST} to 2^63 - 1, or {AS_FITS}: as many as fit",
    _is_length,
    "N",
    read_length,
)
BYTES: Final = whole(1, "BYTES", read_bytes)
SHARE: Final = OptionKind("above 0 and at most 1", _is_share, "SHARE", float)
MODEL: Final = OptionKind("the path of a checkpoint folder", _is_path, "MODEL")
FOLDER: Final = OptionKind("a folder", _is_path, "DIR")
TEMPLATE: Final = OptionKind(
    "the path of a file, or a template's text", _is_template, "FILE"
)
OBJECT: Final = OptionKind(
    "a mapping of names to values", _is_object, "JSON", read_json_object
)
WORD: Final = OptionKind("a word", _is_word)
SPECULATION: Final = OptionKind(
    "a mapping of its keys",
    lambda value: speculative_config(value) is not None or value is None,
    "JSON",
    read_json_object,
)
POLICY: Final = OptionKind(
    "a name or a policy", lambda value: policy_of(value) is not None, "NAME"
)


def option(default: Any, text: str, kind: OptionKind | None = None) -> Any:
    """Returns a field that is also an option: its metadata are argparse's parameters.

    Without a kind it is a flag.
    """
    arguments: dict[str, Any]
    if kind is not None:
        arguments = {"type": kind.read, "metavar": kind.metavar, "choices": kind.choices}
    elif default:
        arguments = {"action": argparse.BooleanOptionalAction}
    else:
        arguments = {"action": "store_true"}
    return field(default=default, validator=kind, metadata={"help": text, **arguments})
