"""Typed reads of a checkpoint's config.json; errors name what is wrong with it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

SIZE_LIMIT: Final = 1 << 40  # for a size
MIN_FLOAT: Final = 5e-324  # of positive floats
FLOAT_LIMIT: Final = 1e100  # products of several numbers below it are finite


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the fault, the file and the
    remedy.
    """


class ModelConfigError(CheckpointError):
    """config.json is missing, unreadable, or has a value of the wrong type or range."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is valid but needs something that minfer does not support (yet)."""


class UnknownModelError(UnsupportedModelError):
    """The family table has no row for the model: transformers' own class may run it."""


def whole_to_int(value: Any) -> Any:
    """Returns the value; a whole float as an int: some tools write 128.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ConfigReader:
    """Reads of one config, or of an object in it; null counts as absent. Raises
    `ModelConfigError`. `own_names`: what the file calls some keys, for errors.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        source: str,
        own_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self.source = source
        self.own_names = own_names

    def is_absent(self, key: str) -> bool:
        """Returns whether the key is missing or null."""
        return self.config.get(key) is None

    def name(self, key: str) -> str:
        """Returns what the file calls a key."""
        return self.own_names.get(key, key)

    def error(self, key: str, expected: str) -> ModelConfigError:
        """Returns the error about a value that is not as `expected`."""
        value = repr(self.config[key]) if key in self.config else "nothing"
        message = (
            f"{self.source}: {self.name(key)} must be {expected}, found {value}; "
            f"correct it"
        )
        return ModelConfigError(
            f"{message} or restore the original config.json of the checkpoint"
        )

    def refusal(self, message: str) -> UnsupportedModelError:
        """Returns the error about a valid value that is not supported."""
        return UnsupportedModelError(f"{self.source}: {message}")

    def unknown(self, message: str) -> UnknownModelError:
        """Returns the error about a model that the family table does not have."""
        return UnknownModelError(f"{self.source}: {message}")

    def size(self, key: str, default: int | None = None, low: int = 1) -> int:
        """Returns an integer of at least `low`."""
        value = default if self.is_absent(key) else whole_to_int(self.config[key])
        # A bool is an int, and not a size.
        if type(value) is not int or not low <= value < SIZE_LIMIT:
            raise self.error(key, f"an integer of at least {low}")
        return value

    def positive(self, key: str, default: float | None = None, low: float = 0.0) -> float:
        """Returns a number above 0, at least `low`, and small enough that products of
        such numbers are finite.
        """
        value: Any = default if self.is_absent(key) else self.config[key]
        if (
            type(value) not in (int, float)
            or not max(low, MIN_FLOAT) <= value < FLOAT_LIMIT
        ):
            expected = f"a number of at least {low}" if low else "a positive number"
            raise self.error(key, expected)
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        """Returns a positive number; None when absent, as is the key ""."""
        return None if self.is_absent(key) else self.positive(key)

    def factors(self, key: str, count: int = 1) -> tuple[float, ...]:
        """Returns a positive number, or a list of `count` of them; 1 when absent, as is
        the key "".
        """
        if self.is_absent(key):
            return (1.0,) * count
        value = self.config[key]
        listed = value if isinstance(value, list) else [value]
        if len(listed) != count:
            raise self.error(key, f"a list of {count} positive numbers")
        return tuple(
            ConfigReader({key: item}, self.source).positive(key) for item in listed
        )

    def flag(self, key: str) -> bool:
        """Returns true or false; false when absent."""
        value = self.config.get(key)
        if value is not None and type(value) is not bool:
            raise self.error(key, "true or false")
        return bool(value)

    def is_set(self, flag: bool | str) -> bool:
        """Returns the flag of that name, or what is known without one; "" is False."""
        return flag if isinstance(flag, bool) else bool(flag) and self.flag(flag)

    def ids(self, key: str) -> tuple[int, ...]:
        """Returns token ids without repetition: one, a list of them, or none."""
        value = self.config.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        ids = [*map(whole_to_int, listed)]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.error(key, "a token id, a list of token ids, or null")
        return tuple(dict.fromkeys(ids))
