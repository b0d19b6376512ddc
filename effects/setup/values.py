"""What the value of a setting may be, and how the command line reads it.

A `Kind` is both: a validator of an attrs field, so that a wrong value is refused
wherever it comes from, and what argparse has to know to make such a value of a word.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import Attribute, field, frozen

from minfer.checks import MOST, ConfigError, is_number
from minfer.effects.setup.speculation import read_json, speculative_config
from minfer.policies import policy_named
from minfer.policy import Policy

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?|[KMGT](?:iB?)?)")
_UNITS: Final = " kmgt"  # each a thousand of the one before, or 1,024


def read_bytes(text: str) -> int:
    """A size as vLLM reads it: 2g is 2 x 10^9, 2G and 2GiB are 2 x 2^30."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write 512M, 2G or 2000000000"
        )
    number, unit = found.groups()
    base = 1000 if unit.islower() else 1024
    return int(float(number) * base ** _UNITS.index(unit[:1].lower() or " "))


@frozen
class Kind:
    """What a setting may be.

    `wanted` says it in words, `right` decides. `metavar`, `read` and `choices` are
    argparse's: the name in help texts, what makes a value of a word, and all words there
    are, if they are few.
    """

    wanted: str
    right: Callable[[Any], bool]
    metavar: str | None = None
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None

    def __call__(self, _: object, attribute: "Attribute[Any]", value: object) -> None:
        """Refuse a field's value that is not right. Raises ConfigError."""
        if not self.right(value):
            raise ConfigError(f"{attribute.name} must be {self.wanted}, not {value!r}")


def whole(low: int = 1, metavar: str = "N", read: Callable[[str], int] = int) -> Kind:
    """A whole number from `low` on, or nothing."""

    def right(value: Any) -> bool:
        return value is None or (is_number(value, whole=True) and low <= value <= MOST)

    return Kind(f"a whole number from {low} to 2^63 - 1", right, metavar, read)


def one_of(known: tuple[str, ...], metavar: str | None = None) -> Kind:
    """One of a few words; help texts list them unless there is a `metavar`."""
    choices = None if metavar else known
    return Kind(
        f"one of {', '.join(known)}", known.__contains__, metavar, choices=choices
    )


def _is_share(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and 0 < value <= 1)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path | None)


def policy_of(wanted: str | Policy) -> Policy:
    """A policy, or the one of that name. Raises ConfigError."""
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
BYTES: Final = whole(1, "BYTES", read_bytes)
SHARE: Final = Kind("above 0 and at most 1", _is_share, "SHARE", float)
MODEL: Final = Kind("the path of a checkpoint folder", _is_path, "MODEL")
FOLDER: Final = Kind("a folder", _is_path, "DIR")
SPECULATION: Final = Kind(
    "a mapping of its keys",
    lambda value: speculative_config(value) is not None or value is None,
    "JSON",
    read_json,
)
POLICY: Final = Kind(
    "a name or a policy", lambda value: policy_of(value) is not None, "NAME"
)


def option(default: Any, text: str, kind: Kind | None = None) -> Any:
    """A field that is also an option: its metadata is what argparse is told.

    Without a kind it is a flag.
    """
    told: dict[str, Any]
    if kind is not None:
        told = {"type": kind.read, "metavar": kind.metavar, "choices": kind.choices}
    elif default:
        told = {"action": argparse.BooleanOptionalAction}
    else:
        told = {"action": "store_true"}
    return field(default=default, validator=kind, metadata={"help": text, **told})
