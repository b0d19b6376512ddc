"""Where engines on other machines listen, as their keeper says it to fronts."""

from pathlib import Path

import pytest

from minfer.effects.cluster.processes.engine_address import (
    EngineAddress,
    note_address,
    noted_address,
)


@pytest.mark.parametrize("kv", [None, ("::1", 7)])
def test_addresses_are_found_until_they_are_gone(
    tmp_path: Path, kv: tuple[str, int] | None
) -> None:
    engine = tmp_path / "engine"
    assert noted_address(engine) is None
    note_address(engine, EngineAddress(("10.0.0.1", 80), ("10.0.0.1", 81)))
    moved = EngineAddress(("::2", 90), kv)
    note_address(engine, moved)
    assert noted_address(engine) == moved
    note_address(engine, None)
    note_address(engine, None)
    assert noted_address(engine) is None
