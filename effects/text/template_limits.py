"""Bounds of the work of a chat template, for any values that a request gives it.

A template comes with the checkpoint, but what it loops over, and what it multiplies, may
be a client's (`chat_template_kwargs`): one number could keep the renderer busy for hours.
So the rounds of `range` in one rendering are counted, and products are bounded. What is
as long as the request itself is bounded with the request.
"""

from typing import Any, Final

from attrs import define
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_LOOP_ROUNDS: Final = 100_000  # of all loops over `range` in one rendering
MAX_PRODUCT_LENGTH: Final = 1 << 22  # characters or items of a product
MAX_POWER_BITS: Final = 4096


@define
class LoopBudget:
    """`range`, for one rendering."""

    remaining: int = MAX_LOOP_ROUNDS

    def range(self, *bounds: Any) -> range:
        """Python's. Raises TemplateError once all loops together are too long."""
        numbers = range(*bounds)
        self.remaining -= len(numbers)
        if self.remaining < 0:
            raise TemplateError(f"its loops go round more than {MAX_LOOP_ROUNDS} times")
        return numbers


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, whose products are bounded."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power. Raises TemplateError if it is too large."""
        if operator == "*" and _product_length(left, right) > MAX_PRODUCT_LENGTH:
            raise TemplateError(f"it repeats something to more than {MAX_PRODUCT_LENGTH}")
        if operator == "**" and _power_bits(left, right) > MAX_POWER_BITS:
            raise TemplateError("it raises a number to too high a power")
        return super().call_binop(context, operator, left, right)


def _product_length(left: Any, right: Any) -> int:
    """The length of a product; 0: it is a number, or an error."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple | bytes) and isinstance(times, int):
            return len(sequence) * times
    return 0


def _power_bits(base: Any, power: Any) -> int:
    """The most bits of a power of whole numbers; 0: it is of another kind."""
    are_integers = isinstance(base, int) and isinstance(power, int)
    return base.bit_length() * power if are_integers else 0
