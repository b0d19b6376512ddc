"""A load from several client processes, where one would be slower than the server.

One event loop of Python reads some ten thousand events a second; a server on a GPU writes
more. Processes begin together and take the numbers of requests from one counter, so that
none is idle while another has requests left.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from attrs import evolve

from minfer.effects.runs.load.load_client import Client, LoadPlan, Outcome

_shared: list[Any] = []  # of a process: the counter and the barrier


def put(load: LoadPlan, processes: int) -> Outcome:
    """Put a load on its server, from as many processes, and wait for all answers."""
    processes = min(processes, load.max_concurrency or processes)
    context = multiprocessing.get_context("spawn")
    shared = context.Value("q", 0), context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _begin, (shared,)) as pool:
        futures = [
            pool.submit(_work, _share(load, processes, i)) for i in range(processes)
        ]
        parts = [future.result() for future in futures]
    records = [record for part in parts for record in part.records]
    return Outcome(
        records=sorted(records, key=lambda record: record.number),
        seconds=max(part.seconds for part in parts),
        cpu=[used for part in parts for used in part.cpu],
    )


def _begin(shared: tuple[Any, ...]) -> None:
    """Keep what a process shares with the others; only a process that starts gets it."""
    _shared.extend(shared)


def _share(load: LoadPlan, processes: int, place: int) -> LoadPlan:
    """The load of one process: its share of the requests in flight."""
    most = load.max_concurrency
    if most is None:
        return load
    share = most // processes + (place < most % processes)
    return evolve(load, max_concurrency=share)


def _work(load: LoadPlan) -> Outcome:
    """Wait for the other processes, then put a share of the load on the server."""
    counter, barrier = _shared

    def take() -> int:
        with counter.get_lock():
            number: int = counter.value
            counter.value += 1
        return number

    client = Client(load, take)
    barrier.wait()
    return client.run()
