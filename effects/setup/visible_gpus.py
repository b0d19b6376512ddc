"""The GPUs that this process may use, without torch."""

import os
from glob import glob
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        # As CUDA does: those behind an invalid one do not count.
        found = [one.strip() for one in named.split(",")]
        ends = (at for at, one in enumerate(found) if one in ("", "-1"))
        return found[: next(ends, len(found))]
    count = len(glob("/dev/nvidia[0-9]*")) or len(glob("/dev/dxg"))
    return [str(number) for number in range(count)]
