"""What the server's processes log: on standard error, each line with the time, and with
the process that says it.
"""

import logging
from typing import Final

_FORM: Final = "%(asctime)s minfer {process} %(levelname)s %(name)s: %(message)s"


def configure_logs(process: str) -> None:
    """Log warnings and worse as this process, from here on."""
    logging.basicConfig(
        level=logging.WARNING, format=_FORM.format(process=process), force=True
    )
