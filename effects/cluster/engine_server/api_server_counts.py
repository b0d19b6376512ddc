"""The counts of all API servers of an engine, with those of API servers' earlier
processes.
"""

from minfer.effects.live.totals import NO_TOTALS, Totals, sum_totals


class ApiServerCounts:
    """What each API server has counted since its process began, and all of them
    together.
    """

    def __init__(self) -> None:
        # By API server: which of its processes is connected, and what that has counted.
        self._processes: dict[int, int] = {}
        self._counts: dict[int, Totals] = {}
        self._past = NO_TOTALS  # of earlier processes

    def begin(self, api_server: int, life: int) -> None:
        """Note a process of an API server: a new one counts from zero."""
        if self._processes.get(api_server) != life:
            last = self._counts.pop(api_server, NO_TOTALS)
            self._past = sum_totals([self._past, last])
            self._processes[api_server] = life

    def note(self, api_server: int, totals: Totals) -> None:
        """Note what an API server's process has counted so far."""
        self._counts[api_server] = totals

    def total(self) -> Totals:
        """Returns the counts of all API servers."""
        return sum_totals([self._past, *self._counts.values()])
