"""Typed access to a GGUF file's metadata; errors name the key and what is wrong."""

import math
from typing import Any, TypeVar

from minfer.effects.models.gguf.container import GgufArray, GgufError, GgufFile, Value

Default = TypeVar("Default")
SIZE_LIMIT = 1 << 40  # above all sizes


class GgufMetadata:
    """Reads values of one file's metadata by their keys; a key that begins with a dot
    means `arch`, the file's architecture, before it. All reads raise `GgufError` for a
    value of another type, and for a missing one without `default`.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.arch = ""
        self.arch = self.text("general.architecture")

    def error(self, key: str, expected: str) -> GgufError:
        """Returns the error about a value that is not as `expected`."""
        value = self.get(key)
        shown = repr(value)
        if isinstance(value, GgufArray):
            shown = f"an array of {value.count} elements"
        return self.fault(key, f"must be {expected}, found {shown:.100}")

    def fault(self, key: str, message: str) -> GgufError:
        """Returns an error about a key, of which `message` says what is wrong."""
        return GgufError(
            f"{self.file.path}: metadata {self.full(key)} {message}; download the file "
            f"again, or convert the model again"
        )

    def full(self, key: str) -> str:
        """Returns the key with the architecture before it, as in the file."""
        return self.arch + key if key.startswith(".") else key

    def get(self, key: str) -> Value | None:
        """Returns a value of any type; None: there is none."""
        return self.file.metadata.get(self.full(key))

    def text(self, key: str, default: Any = ...) -> str:
        """Returns a string."""
        value = self._or_default(key, default)
        if not isinstance(value, str) and value is not default:
            raise self.error(key, "a string")
        return str(value)

    def integer(
        self, key: str, default: Any = ..., low: int = 1, below: int = SIZE_LIMIT
    ) -> int:
        """Returns an integer that is at least `low` and less than `below`."""
        value = self._or_default(key, default)
        if value is not default and (type(value) is not int or not low <= value < below):
            raise self.error(key, f"an integer from {low} to {below - 1}")
        return int(value)

    def number(self, key: str, default: Any = ...) -> float:
        """Returns a finite number above 0."""
        value = self._or_default(key, default)
        is_number = type(value) in (int, float) and math.isfinite(value) and value > 0
        if value is not default and not is_number:
            raise self.error(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Returns true or false."""
        value = self._or_default(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def array(self, key: str) -> GgufArray:
        """Returns an array."""
        value = self._or_default(key, ...)
        if not isinstance(value, GgufArray):
            raise self.error(key, "an array")
        return value

    def same_in_all_layers(self, key: str, default: Any = ..., low: int = 1) -> int:
        """Returns an integer that may be given once or for each layer; all have to be
        equal.
        """
        value = self.get(key)
        if not isinstance(value, GgufArray):
            return self.integer(key, default, low)
        values = set(value.numbers())
        if len(values) != 1 or type(number := values.pop()) is not int or number < low:
            raise self.error(key, f"the same integer, at least {low}, in all layers")
        return number

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is ...:
            raise self.fault(key, "is missing")
        return default if value is None else value
