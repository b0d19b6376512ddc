"""Plans as words: what is sent, and how often."""

import pytest

from minfer.effects.execution.device_rows import DeviceRows
from minfer.request import Request
from tests.effects.execution.tiny_engine import Model, Run

pytestmark = pytest.mark.usefixtures("kind")


def test_a_steady_decode_names_its_rows_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, ...]] = []
    set_batch = DeviceRows.set_batch

    def counted(self: DeviceRows, rows: tuple[int, ...], size: int) -> None:
        calls.append(rows)
        set_batch(self, rows, size)

    monkeypatch.setattr(DeviceRows, "set_batch", counted)
    run = Run.start(model, num_blocks=200)
    run.serve([Request(id=str(i), prompt=(i + 2,), max_tokens=60) for i in range(8)])
    assert len(calls) == 1
