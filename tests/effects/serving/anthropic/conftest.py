"""Anthropic's own SDK, at the server that tests share."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic

from tests.effects.served import Serving


@pytest.fixture(scope="session")
def anthropic(bundled: Serving) -> Iterator[Anthropic]:
    with Anthropic(base_url=bundled.url, api_key="none", max_retries=0) as client:
        yield client
