"""Where an engine on another machine is and listens now: a file beside the path that a
socket of an engine on this machine would have, which its keeper writes and API servers
read.
"""

from pathlib import Path

from attrs import frozen

from minfer.effects.net.addresses import Port, port_text, read_port


@frozen
class EngineAddress:
    """Where an engine listens."""

    port: Port  # for API servers
    kv: Port | None = None  # for engines that send KV blocks, if it receives these
    machine: str = ""  # as people know that


def write_address(path: Path, address: EngineAddress | None) -> None:
    """Write where the engine of a socket's path listens; None: nowhere now."""
    file = _address_file(path)
    if address is None:
        file.unlink(missing_ok=True)
        return
    temporary = file.with_suffix(".part")
    ports = [address.port] if address.kv is None else [address.port, address.kv]
    temporary.write_text("\n".join([address.machine, *map(port_text, ports)]))
    temporary.rename(file)  # never there in part


def read_address(path: Path) -> EngineAddress | None:
    """Returns where the engine of a socket's path listens, if there is one."""
    try:
        text = _address_file(path).read_text()
    except FileNotFoundError:
        return None
    machine, port, *kv = text.split("\n")
    return EngineAddress(read_port(port), read_port(kv[0]) if kv else None, machine)


def _address_file(path: Path) -> Path:
    return path.with_name("address")
