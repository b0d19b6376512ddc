"""Totals as they cross the line, and back."""

from minfer.effects.live.link import messages as wire
from minfer.effects.live.totals import Histogram, Totals


def to_wire(totals: Totals) -> wire.Totals:
    """Totals as they cross the line."""
    told = {
        name: wire.Histogram(one.bounds, one.counts, one.total)
        for name, one in totals.histograms.items()
    }
    return wire.Totals(dict(totals.counts), told)


def from_wire(totals: wire.Totals) -> Totals:
    """Totals as they were before."""
    found = {
        name: Histogram(one.bounds, one.counts, one.total)
        for name, one in totals.histograms.items()
    }
    return Totals(totals.counts, found)
