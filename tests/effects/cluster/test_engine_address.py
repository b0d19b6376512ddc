"""Where engines on other machines listen, as their keeper says it to API servers."""

from pathlib import Path

import pytest

from minfer.effects.cluster.processes.engine_address import (
    EngineAddress,
    read_address,
    write_address,
)


@pytest.mark.parametrize("kv", [None, ("::1", 7)])
def test_addresses_are_found_until_they_are_gone(
    tmp_path: Path, kv: tuple[str, int] | None
) -> None:
    engine = tmp_path / "engine"
    assert read_address(engine) is None
    write_address(engine, EngineAddress(("10.0.0.1", 80), ("10.0.0.1", 81)))
    moved = EngineAddress(("::2", 90), kv)
    write_address(engine, moved)
    assert read_address(engine) == moved
    write_address(engine, None)
    write_address(engine, None)
    assert read_address(engine) is None
