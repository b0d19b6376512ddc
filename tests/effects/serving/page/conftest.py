"""One browser for all tests of the page, and a server whose answers take a moment."""

from collections.abc import Iterator

import pytest

from tests.effects.browser import Browser, browser
from tests.effects.served import Serving, serving
from tests.effects.serving.page.visits import DRY


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def dry() -> Iterator[Serving]:
    with serving(names=("bundled",), step=0.004, **DRY) as server:
        yield server
