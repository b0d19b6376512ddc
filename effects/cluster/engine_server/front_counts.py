"""The counts of all fronts of an engine, with those of fronts' earlier processes."""

from minfer.effects.live.totals import NO_TOTALS, Totals, sum_totals


class FrontCounts:
    """What each front has counted since its process began, and all of them together."""

    def __init__(self) -> None:
        # By front: which of its processes is connected, and what that has counted.
        self._processes: dict[int, int] = {}
        self._counts: dict[int, Totals] = {}
        self._past = NO_TOTALS  # of earlier processes

    def begin(self, front: int, life: int) -> None:
        """Note a process of a front: a new one counts from zero."""
        if self._processes.get(front) != life:
            last = self._counts.pop(front, NO_TOTALS)
            self._past = sum_totals([self._past, last])
            self._processes[front] = life

    def note(self, front: int, totals: Totals) -> None:
        """Note what a front's process has counted so far."""
        self._counts[front] = totals

    def total(self) -> Totals:
        """Returns the counts of all fronts."""
        return sum_totals([self._past, *self._counts.values()])
