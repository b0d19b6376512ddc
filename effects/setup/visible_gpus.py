"""The GPUs that this process may use, without torch."""

import os
from glob import glob
from typing import Final

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    variable = os.environ.get(VISIBLE_VARIABLE)
    if variable is not None:
        # As CUDA does: those behind an invalid one do not count.
        gpus = [name.strip() for name in variable.split(",")]
        first_invalid = (index for index, gpu in enumerate(gpus) if gpu in ("", "-1"))
        return gpus[: next(first_invalid, len(gpus))]
    count = len(glob("/dev/nvidia[0-9]*")) or len(glob("/dev/dxg"))
    return [str(number) for number in range(count)]
