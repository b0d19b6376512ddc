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

TRIM_GROWTH_BYTES: Final = 128 << 20  # growth that causes the next trim
TRIM_CHECK_SECONDS: Final = 5.0  # between two checks
MAX_ONEDNN_PRODUCTS: Final = 128  # kept by oneDNN
ONEDNN_CACHE_VARIABLE: Final = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def bound_onednn_cache() -> None:
    """Let oneDNN keep fewer products, unless the user has set a number; before torch's
    first product.
    """
    os.environ.setdefault(ONEDNN_CACHE_VARIABLE, str(MAX_ONEDNN_PRODUCTS))


def resident_bytes() -> int:
    """Returns the resident bytes of this process; 0 where the system does not report
    it.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * PAGE_BYTES
    return 0


def release_free_pages() -> None:
    """Return the allocator's free pages to the system, where it is glibc's."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@define
class Trim:
    """Returns memory to the system whenever the process has grown."""

    floor: int = 0  # resident bytes after the last trim

    def trim_if_grown(self) -> bool:
        """Return free memory if the process has grown enough; returns whether it has."""
        now = resident_bytes()
        if now - self.floor < TRIM_GROWTH_BYTES:
            self.floor = min(self.floor, now)
            return False
        release_free_pages()
        self.floor = resident_bytes()
        return True
