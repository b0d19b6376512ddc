"""Where the ranks of an engine find each other: a store of torch's, which has rank 0's
socket, the key of its connections and its settings.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final

from minfer.effects.execution.ranks.started_by import is_by_torchrun
from minfer.values.checks import ConfigError

HERE: Final = "127.0.0.1"
FOUND: Final = 10.0  # seconds in which a store that is there must answer
RESTARTS: Final = "TORCHELASTIC_RESTART_COUNT"
# Keys of the store.
ADDRESS, KEY, SETTINGS = "minfer/address", "minfer/key", "minfer/settings"


class RankStartError(ConfigError):
    """The ranks of an engine cannot be started together."""


def make_store(ranks: int) -> Any:
    """Returns the store of an engine's ranks: torchrun's, or one at a free port. Raises
    RankStartError.
    """
    if is_by_torchrun():
        port = int(os.environ["MASTER_PORT"])
        leads = not _is_agent_s()
        return _store(os.environ["MASTER_ADDR"], port, ranks, leads=leads)
    return _store(HERE, 0, ranks, leads=True)


def find_store() -> Any:
    """Returns the store that rank 0 made, in another rank. Raises RankStartError."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return _store(host, port, int(os.environ["WORLD_SIZE"]), leads=False)


def _store(host: str, port: int, ranks: int, *, leads: bool) -> Any:
    """Returns a store, apart from those of earlier starts by the same torchrun."""
    from torch import distributed as torch_ranks

    made: Any = torch_ranks  # its stores are public, but not said to be

    def make() -> Any:
        return made.TCPStore(host, port, ranks, is_master=leads, wait_for_workers=False)

    # One that rank 0 makes under torchrun may come late; all others are there.
    is_there = leads or not is_by_torchrun() or _is_agent_s()
    try:
        store = _within(FOUND, make) if is_there else make()
    except (RuntimeError, ValueError, TimeoutError) as error:
        line = str(error).strip().partition("\n")[0]
        raise RankStartError(
            f"the store of the ranks at {host}:{port} cannot be "
            f"{'made' if leads else 'reached'}: {line}; if another program has this "
            f"port, choose another one (torchrun --master-port)"
        ) from error
    return made.PrefixStore(f"minfer {os.environ.get(RESTARTS, 0)}", store)


def _is_agent_s() -> bool:
    """Whether torchrun's agent has made the store, rather than leave that to rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _within(seconds: float, make: Callable[[], Any]) -> Any:
    """Call something of torch's that may wait for a silent peer without end, whatever its
    own timeout. Raises what it raises, or TimeoutError: then its thread goes on waiting.
    """
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="minfer-store", daemon=True).start()
    try:
        return made.result(seconds)
    except FutureTimeout as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error
