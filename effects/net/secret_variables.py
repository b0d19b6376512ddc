"""Environment variables with secrets: a server removes them once it has read them, and no
spawned process gets them.
"""

import ctypes
import os
from typing import Final

SECRET_VARIABLES: Final = (
    "MINFER_API_KEY",
    "MINFER_CACHE_SECRET",
    "MINFER_SSL_KEYFILE_PASSWORD",
)


def environment_without_secrets() -> dict[str, str]:
    """Returns the environment without secrets, for a process that does not need them."""
    return {
        name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES
    }


def remove_secrets() -> None:
    """Remove the secrets from the environment, once they are read. The values are
    overwritten in memory, too, as /proc/PID/environ of forked processes shows it.
    """
    system = ctypes.CDLL(None)
    system.getenv.restype = ctypes.c_void_p
    for name in SECRET_VARIABLES:
        if value := system.getenv(name.encode()):
            ctypes.memset(value, 0, len(ctypes.string_at(value)))
        os.environ.pop(name, None)
