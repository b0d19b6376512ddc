"""What a server of several processes notes of the ends of its engines."""

from collections.abc import Callable
from typing import Any

import pytest

from minfer.effects.cluster.link.crash_rule import EndKind
from minfer.effects.cluster.processes.deployment import Deployment
from minfer.effects.cluster.processes.engine_ends import EngineEnds
from minfer.effects.serving.processes import serve_processes
from minfer.effects.serving.processes.serve_processes import (
    ForkedServer,
    serve_in_processes,
)
from minfer.effects.serving.processes.server import HttpOptions
from minfer.effects.setup.engine_args import EngineArgs


@pytest.mark.parametrize(
    ("prefill_ranks", "decode_ranks", "noted"),
    [(1, 1, [True, True]), (2, 1, [False, True]), (1, 2, [True, False])],
)
def test_the_end_of_an_engine_of_several_ranks_is_no_crash_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    prefill_ranks: int,
    decode_ranks: int,
    noted: list[bool],
) -> None:
    args = EngineArgs(
        model="any", executor="dry", device="cpu", tensor_parallel_size=decode_ranks
    )
    deployment = Deployment(replicas=2, prefillers=1, prefill_ranks=prefill_ranks)
    server = ForkedServer(
        args=args,
        options=HttpOptions(names=["x"]),
        deployment=deployment,
        paths=[],
        listeners=[],
        links=[],
        api_servers=1,
        ends=EngineEnds(2),
    )

    class EndsAtOnce:
        """A supervisor whose engines end by an error."""

        def __init__(self, *_: Any, note_end: Callable[[str, int], None], **__: Any):
            self.note_end = note_end

        def run(self, _: Callable[[], None]) -> int:
            for name in ("engine 0", "engine 1", "api 0"):
                self.note_end(name, 1)
            return 0

    monkeypatch.setattr(serve_processes, "Supervisor", EndsAtOnce)
    monkeypatch.setattr(ForkedServer, "opened", lambda *_: server)
    engines = dict.fromkeys(["engine 0", "engine 1"])  # none of which is started
    monkeypatch.setattr(ForkedServer, "engines", lambda *_: engines)
    options = server.options
    assert not serve_in_processes(args, options, "", 0, 1, lambda run: run(), deployment)
    kinds = [server.ends.last(number).kind for number in range(2)]
    expected = [EndKind.CRASHED if is_crash else EndKind.UNKNOWN for is_crash in noted]
    assert kinds == expected
