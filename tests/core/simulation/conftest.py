"""As for journals: the paths of large states."""

from tests.core.journal.conftest import tiny_thresholds as tiny_thresholds
