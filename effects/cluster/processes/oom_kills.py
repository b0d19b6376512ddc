"""How many processes the kernel has killed for memory: a kill after which this has risen
was probably the kernel's, and no one's from outside.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")  # of version 2
PROC: Final = Path("/proc")


def oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Returns the count of this process's control group, or, if that has none, of the
    machine; None if the system does not say.
    """
    paths = [cgroups / "memory.events", proc / "vmstat"]
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text("utf-8").splitlines():
            if line.startswith("0::/"):
                group = line.removeprefix("0::/")
                paths.insert(0, cgroups / group / "memory.events")
    counts = map(_count, paths)
    return next((count for count in counts if count is not None), None)


def _count(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None
