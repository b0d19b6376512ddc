"""The progress bars of weights that are loaded or written."""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tqdm import tqdm

MIN_BAR_BYTES: Final = 1 << 30  # of weights, from which on a bar is shown


def bar_disabled(total: int) -> bool | None:
    """Returns tqdm's `disable` for `total` bytes: None shows a bar on a terminal only."""
    return None if total >= MIN_BAR_BYTES else True


def weights_bar(total: int) -> "tqdm[Any]":
    """Returns a bar of `total` bytes."""
    from tqdm import tqdm  # here: `minfer plan` reads no weights

    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="Weights",
        disable=bar_disabled(total),
    )
