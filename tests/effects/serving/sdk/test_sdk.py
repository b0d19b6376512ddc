"""Each client's cases, against live servers."""

from collections.abc import Iterator

import pytest

from tests.effects.serving.sdk.cases import Case
from tests.effects.serving.sdk.servers import Servers
from tests.effects.serving.sdk.tables import TABLES

CASES = [case for table in TABLES for case in table]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("sdk"))
    yield servers
    servers.close()


# Warnings of clients, and of what they leave to the garbage collector, are not ours.
@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case(case: Case, servers: Servers) -> None:
    if reason := case.lacks():
        pytest.skip(reason)
    case.run(servers)


def test_each_says_something_else() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) > 40
