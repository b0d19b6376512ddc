"""Options that were removed or renamed: refused by name, with what replaces them."""

import argparse
from collections.abc import Mapping
from typing import Any, NoReturn


def refuse(
    options: argparse._ActionsContainer, reasons: Mapping[str, str], verb: str = "removed"
) -> None:
    """Add options that no help shows, and whose use is an error with its reason."""
    for name, reason in reasons.items():
        options.add_argument(
            name,
            nargs="*",
            action=_RefusedOption,
            const=f"was {verb}: {reason}",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _RefusedOption(argparse.Action):
    """An option that cannot be used."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise argparse.ArgumentError(self, self.const)
