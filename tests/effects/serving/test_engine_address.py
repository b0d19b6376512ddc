"""What the keeper of engines writes of where they are, and fronts read."""

from pathlib import Path

from minfer.effects.serving.processes.engine_address import (
    EngineAddress,
    note_address,
    noted_address,
)


def test_what_was_noted_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine"
    assert noted_address(path) is None
    note_address(path, None)
    note_address(path, ("10.0.0.1", 4000), "node-a (10.0.0.1)")
    note_address(path, ("fd00::2", 4001), "node-b (fd00::2)")  # it has moved
    assert noted_address(path) == EngineAddress(("fd00::2", 4001), "node-b (fd00::2)")
    note_address(path, None)
    assert noted_address(path) is None
    assert [*tmp_path.iterdir()] == []
