"""Where an engine on another machine is and listens now: a file beside the path that a
socket of an engine on this machine would have, which its keeper writes and fronts read.
"""

from pathlib import Path

from attrs import frozen

from minfer.effects.execution.tiers.peers.addresses import Port, port_text, read_port


@frozen
class EngineAddress:
    """Where an engine listens, and its machine, as people know that."""

    port: Port
    machine: str


def note_address(path: Path, port: Port | None, machine: str = "") -> None:
    """Write where the engine of a socket's path listens; None: nowhere now."""
    file = _address_file(path)
    if port is None:
        file.unlink(missing_ok=True)
        return
    part = file.with_suffix(".part")
    part.write_text(f"{port_text(port)}\n{machine}")
    part.rename(file)  # never there in part


def noted_address(path: Path) -> EngineAddress | None:
    """Returns where the engine of a socket's path is, if there is one."""
    try:
        port, machine = _address_file(path).read_text().split("\n", 1)
    except FileNotFoundError:
        return None
    return EngineAddress(read_port(port), machine)


def _address_file(path: Path) -> Path:
    return path.with_name("address")
