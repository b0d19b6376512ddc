"""The version, where everybody can read it without importing anything else."""

from typing import Final

__version__: Final = "0.1.0"
