"""Memory of this process that nobody uses, given back to the system.

Theory. C's allocator keeps what is freed for the next time, in the places where it was;
tensors of ever other sizes leave holes that no later one fits, and a process that serves
on the CPU grows to several times what it holds. glibc gives pages of holes back when
asked (`malloc_trim`), which takes milliseconds, so it is asked only when the process has
grown. oneDNN, with which torch multiplies on the CPU, keeps a compiled product for each
shape that it has met, 1,024 of them, half a megabyte each; a batch that grows and shrinks
meets a few dozen again and again.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define

GROWN: Final = 128 << 20  # bytes since the last time from which on it is worth a look
EVERY: Final = 5.0  # seconds between two looks
PRODUCTS: Final = 128  # that oneDNN keeps
PRODUCTS_NAME: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def bound_products() -> None:
    """Let oneDNN keep fewer products, unless its user has said how many; before torch
    multiplies for the first time.
    """
    os.environ.setdefault(PRODUCTS_NAME, str(PRODUCTS))


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE
    return 0


def give_back() -> None:
    """Give the allocator's free pages to the system, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@define
class Trim:
    """Gives memory back whenever a process has grown."""

    floor: int = 0  # bytes that were resident after the last time

    def look(self) -> bool:
        """Whether it has grown by enough; then what is free is given back."""
        now = resident()
        if now - self.floor < GROWN:
            self.floor = min(self.floor, now)
            return False
        give_back()
        self.floor = resident()
        return True
