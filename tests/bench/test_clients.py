"""Several client processes share the requests of a load and its concurrency."""

from collections import Counter

import pytest

from bench.clients import put
from tests.effects.runs.load.stub import WHOLE, load_on, stream, stub


@pytest.mark.long
@pytest.mark.parametrize(("processes", "used"), [(2, 2), (9, 3)])
def test_processes_share_the_requests_and_the_concurrency(
    processes: int, used: int
) -> None:
    with stub(stream(0.02, *WHOLE)) as server:
        outcome = put(load_on(server.url, 60, max_concurrency=3), processes)
        assert server.connections == 3
        prompts = Counter(server.requested)
    assert [one.number for one in outcome.records] == [*range(60)]
    assert all(one.completed for one in outcome.records)
    assert set(prompts.values()) == {1}
    assert len(outcome.cpu) == used
    assert outcome.seconds == max(one.ended for one in outcome.records)
