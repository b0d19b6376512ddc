"""Returns unused memory of this process to the system.

Theory. C's allocator keeps freed memory for later use, where it was; tensors of changing
sizes leave holes that no later one fits, and a process that serves on the CPU grows to
several times what it uses. glibc returns pages of holes on request (`malloc_trim`), which
takes milliseconds, so that is called only when the process has grown. oneDNN, with which
torch multiplies on the CPU, keeps a compiled product for each shape that it has met,
1,024 of them, half a megabyte each; a batch that grows and shrinks meets a few dozen
again and again.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define

GROWN: Final = 128 << 20  # bytes of growth since the last trim that cause another
EVERY: Final = 5.0  # seconds between two checks
PRODUCTS: Final = 128  # kept by oneDNN
PRODUCTS_NAME: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def bound_products() -> None:
    """Let oneDNN keep fewer products, unless the user has set a number; before torch's
    first product.
    """
    os.environ.setdefault(PRODUCTS_NAME, str(PRODUCTS))


def resident() -> int:
    """Returns the resident bytes of this process; 0 where the system does not report
    it.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE
    return 0


def give_back() -> None:
    """Return the allocator's free pages to the system, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@define
class Trim:
    """Returns memory to the system whenever the process has grown."""

    floor: int = 0  # resident bytes after the last trim

    def look(self) -> bool:
        """Return free memory if the process has grown enough; returns whether it has."""
        now = resident()
        if now - self.floor < GROWN:
            self.floor = min(self.floor, now)
            return False
        give_back()
        self.floor = resident()
        return True
