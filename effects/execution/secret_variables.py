"""The environment's variables with secrets: only the process that reads them has them."""

import ctypes
import os
from typing import Final

SECRETS: Final = ("MINFER_API_KEY", "MINFER_CACHE_SECRET", "MINFER_SSL_KEYFILE_PASSWORD")


def inherited() -> dict[str, str]:
    """Returns the environment without secrets, for a process that does not need them."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def remove_secrets() -> None:
    """Remove the secrets from the environment, once they are read. Processes that are
    forked share the memory of it that the system shows (/proc/PID/environ), so their
    values are overwritten.
    """
    system = ctypes.CDLL(None)
    system.getenv.restype = ctypes.c_void_p
    for name in SECRETS:
        if value := system.getenv(name.encode()):
            ctypes.memset(value, 0, len(ctypes.string_at(value)))
        os.environ.pop(name, None)
