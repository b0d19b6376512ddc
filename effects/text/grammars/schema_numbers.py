"""Checks for numbers in schemas that the compiler cannot represent or enforce."""

from decimal import Decimal
from math import lcm
from typing import Any, Final

from attrs import define

from minfer.effects.text.grammars.grammar_library import KeywordError
from minfer.effects.text.grammars.rewriting import nested_values

_MAX_SHOWN_DIGITS: Final = 32  # of a number in an error
# The compiler stores numbers as doubles, and integers in 64 bits. Beyond these it hangs,
# and ends the process.
_MAX_NUMBER: Final = 2**62
# The compiler makes a state for each remainder: more of them take minutes and gigabytes.
_MAX_REMAINDERS: Final = 10_000


@define
class Multiples:
    """The values of `multipleOf` in one schema: they may all hold for one number."""

    _remainders: int = 1  # of all together

    def add(self, number: Any) -> None:
        """Add a value. Raises KeywordError if all together have too many remainders."""
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and number:
            combined = lcm(self._remainders, _hard_part(number))
            if combined > _MAX_REMAINDERS:
                reason = (
                    f"multiples of {number} cannot be told apart; leave multipleOf out"
                )
                raise KeywordError(reason, "multipleOf")
            self._remainders = combined


def check_numbers(word: str, value: Any) -> None:
    """Raise KeywordError for a number that the compiler would round, or cannot keep."""
    for number in nested_values([value]):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if abs(number) >= _MAX_NUMBER:
            digits = str(number)
            shown = (
                digits
                if len(digits) <= _MAX_SHOWN_DIGITS
                else f"{digits[:_MAX_SHOWN_DIGITS]}..."
            )
            reason = f"the number {shown} is too large; at most 2^62 can be enforced"
            raise KeywordError(reason, word)
        if isinstance(number, int) and float(number) != number:
            reason = f"the number {number} has more digits than can be enforced"
            raise KeywordError(reason, word)


def check_counts(schema: dict[str, Any]) -> None:
    """Raise KeywordError for bounds of the number of properties that the compiler cannot
    enforce, as listed properties are optional.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    if all(
        name in required
        for name, subschema in properties.items()
        if subschema is not False
    ):
        return
    minimum = schema.get("minProperties", 0)
    maximum = schema.get("maxProperties")
    if not isinstance(minimum, int) or not isinstance(maximum, int | None):
        return
    minimum = max(0, minimum - len(required))
    upper = None if maximum is None else max(0, maximum - len(required))
    closed = schema.get("additionalProperties") is False
    simple = minimum <= 1 and upper in (None, 1) and "patternProperties" not in schema
    if (minimum or upper is not None) and not (simple and closed):
        word = "minProperties" if minimum else "maxProperties"
        reason = "cannot be enforced where listed properties may be left out"
        raise KeywordError(
            f"the keyword {word!r} {reason}; require them, or drop it", word
        )


def _hard_part(number: float) -> int:
    """The digits of a number as an integer, without trailing zeros."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))
