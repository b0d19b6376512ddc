"""Where an engine on another machine listens now: a file beside the path that a socket of
an engine on this machine would have, which its keeper writes and fronts read.
"""

from pathlib import Path

from minfer.effects.execution.tiers.peers.addresses import Port, port_text, read_port


def note_address(path: Path, port: Port | None) -> None:
    """Write where the engine of a socket's path listens; None: nowhere now."""
    file = _address_file(path)
    if port is None:
        file.unlink(missing_ok=True)
        return
    part = file.with_suffix(".part")
    part.write_text(port_text(port))
    part.rename(file)  # never there in part


def noted_address(path: Path) -> Port | None:
    """Returns where the engine of a socket's path listens, if there is one."""
    try:
        return read_port(_address_file(path).read_text())
    except FileNotFoundError:
        return None


def _address_file(path: Path) -> Path:
    return path.with_name("address")
