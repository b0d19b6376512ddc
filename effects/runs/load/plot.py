"""A load as a picture: throughput over time, and how latencies are spread."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from minfer.effects.runs.load import statistics
from minfer.effects.runs.load.record import LoadError, Record
from minfer.extras import how_to_install

_BINS: Final = 60  # parts of a run
_POINTS: Final = 500  # of a curve


def check_plot(path: Path) -> None:
    """Raise LoadError if nothing could be drawn there after the load."""
    if find_spec("matplotlib") is None:
        raise LoadError(f"--plot needs matplotlib: {how_to_install('bench')}")
    if path.suffix != ".svg":
        raise LoadError(f"--plot {path}: its name must end with .svg")


def draw(path: Path, records: Sequence[Record]) -> None:
    """Draw a run; the same records give the same file."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "minfer", "font.size": 9})
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    time, first, each = figure.subplots(1, 3)
    done = [one for one in records if one.good]
    _over_time(time, done)
    _shares(first, {"TTFT": [one.ttft for one in done if one.ttft is not None]})
    first.set(xlabel="TTFT, ms")
    found = statistics.gaps(done)
    tpot = [one.tpot for one in done if one.tpot is not None]
    _shares(each, {"ITL": found.each, "TPOT": tpot})
    each.set(xlabel="ITL and TPOT, ms")
    figure.savefig(path, format="svg", metadata={"Date": None})


def _over_time(axes: Any, records: Sequence[Record]) -> None:
    """Output tokens a second, and requests at once."""
    end = max((one.ended for one in records), default=1.0)
    edges = np.linspace(0, max(end, 1e-6), _BINS + 1)
    came = [np.asarray(one.events or [one.ended], float) for one in records]
    brought = [
        statistics.event_tokens(one) if one.events else np.array([one.output_tokens])
        for one in records
    ]
    if came:
        tokens, _ = np.histogram(
            np.concatenate(came), edges, weights=np.concatenate(brought)
        )
        axes.stairs(tokens / np.diff(edges), edges, fill=True, alpha=0.5)
    axes.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))
    flight, other = statistics.in_flight(records), axes.twinx()
    other.step(flight.times, flight.counts, where="post", color="black", linewidth=0.8)
    other.set(ylabel="requests at once", ylim=(0, None))


def _shares(axes: Any, curves: dict[str, Any]) -> None:
    """Which share of values is below each."""
    shares = np.linspace(0, 1, _POINTS)
    for name, values in curves.items():
        if len(values):
            axes.plot(np.quantile(values, shares) * 1000, shares, label=name)
            axes.legend()
    axes.set(ylabel="share", ylim=(0, 1))
