"""Numbers in schemas: those that the compiler cannot keep, count or tell apart."""

from decimal import Decimal
from math import lcm
from typing import Any, Final

from attrs import define

from minfer.effects.text.grammars.grammar_library import KeywordError
from minfer.effects.text.grammars.rewriting import every_part

_LONGEST: Final = 32  # digits of a number that an error shows
# The compiler keeps numbers as doubles, and whole ones as 64 bits: where those end it
# never comes back, and takes the process with it.
_LARGEST: Final = 2**62
# The compiler makes a state for each remainder: of a larger number, it makes nothing else
# for minutes, in gigabytes.
_MOST_REMAINDERS: Final = 10_000


@define
class Multiples:
    """The multiples in one schema: what holds of one value may be anywhere in it."""

    _remainders: int = 1  # of all together

    def add(self, number: Any) -> None:
        """Add a multiple. Raises KeywordError if all are too hard to tell."""
        if isinstance(number, int | float) and number:
            together = lcm(self._remainders, _hard_part(number))
            if together > _MOST_REMAINDERS:
                reason = (
                    f"multiples of {number} cannot be told apart; leave multipleOf out"
                )
                raise KeywordError(reason, "multipleOf")
            self._remainders = together


def check_numbers(word: str, value: Any) -> None:
    """Raise KeywordError for a number that the compiler would round, or cannot keep."""
    for entry in every_part([value]):
        if not isinstance(entry, int | float) or isinstance(entry, bool):
            continue
        if abs(entry) >= _LARGEST:
            digits = str(entry)
            shown = digits if len(digits) <= _LONGEST else f"{digits[:_LONGEST]}..."
            reason = f"the number {shown} is too large; at most 2^62 can be enforced"
            raise KeywordError(reason, word)
        if isinstance(entry, int) and float(entry) != entry:
            reason = f"the number {entry} has more digits than can be enforced"
            raise KeywordError(reason, word)


def check_counts(schema: dict[str, Any]) -> None:
    """Raise KeywordError for numbers of properties that the compiler cannot count: where
    some of those that are listed may be left out.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return
    if all(name in required for name, entry in properties.items() if entry is not False):
        return
    least = schema.get("minProperties", 0)
    most = schema.get("maxProperties")
    if not isinstance(least, int) or not isinstance(most, int | None):
        return
    least = max(0, least - len(required))
    left = None if most is None else max(0, most - len(required))
    closed = schema.get("additionalProperties") is False
    simple = least <= 1 and left in (None, 1) and "patternProperties" not in schema
    if (least or left is not None) and not (simple and closed):
        word = "minProperties" if least else "maxProperties"
        reason = "cannot be enforced where listed properties may be left out"
        raise KeywordError(
            f"the keyword {word!r} {reason}; require them, or drop it", word
        )


def _hard_part(number: float) -> int:
    """Its digits as a whole number, without zeros at their end."""
    return int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits)))
