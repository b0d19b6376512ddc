"""The server that tests share, as in `tests.effects.serving`."""

from tests.effects.serving.conftest import bundled as bundled
