"""The comparison as a picture. It needs matplotlib, of the extra `bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from matplotlib import rcParams
from matplotlib.figure import Figure

from minfer.effects.cli.compare.report import Comparison, labels
from minfer.effects.cli.compare.results import LevelResult, Speed

SIZE: Final = (11, 6.5)  # inches
MIB: Final = 2**20


def draw(found: Comparison, path: Path) -> None:
    """Write the picture, as PNG or SVG by the name of its file; as SVG, the same figures
    give the same file.
    """
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "minfer", "font.size": 9})
    figure: Any = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle(f"{found.levels[0].model} on {found.device.name}")
    (memory, perplexity, divergence), lines = figure.subplots(2, 3)
    _bars(memory, found, "weights held, MiB", lambda one: one.memory.weights_held / MIB)
    _bars(perplexity, found, "perplexity", lambda one: one.quality.perplexity)
    _bars(
        divergence,
        found,
        "KL divergence from the base, nats",
        lambda one: one.quality.kl_divergence or 0.0,
        _agreement,
    )
    _lines(lines[0], found, "TTFT, ms", lambda one: one.ttft * 1000)
    _lines(lines[1], found, "TPOT, ms", lambda one: one.tpot * 1000)
    _lines(lines[2], found, "output tokens/s", lambda one: one.throughput)
    lines[0].legend()
    date = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=date)


def _agreement(one: LevelResult) -> str:
    """Returns the text above a level's divergence."""
    share = one.quality.top1_agreement
    return "base" if share is None else f"top-1 {share:.1%}"


def _bars(
    axes: Any,
    found: Comparison,
    title: str,
    value: Callable[[LevelResult], float],
    text: Callable[[LevelResult], str] | None = None,
) -> None:
    """Draw a bar for each level, with its value or a text above it."""
    places = range(len(found.levels))
    values = [value(level) for level in found.levels]
    bars = axes.bar(places, values, color=[f"C{place}" for place in places])
    texts = [f"{one:.4g}" for one in values]
    if text is not None:
        texts = [text(level) for level in found.levels]
    axes.bar_label(bars, texts)
    axes.set(title=title, xticks=places, xticklabels=labels(found))
    axes.margins(y=0.15)


def _lines(
    axes: Any, found: Comparison, title: str, value: Callable[[Speed], float]
) -> None:
    """Draw a line for each level, over batches."""
    batches = found.load.batches
    for level, label in zip(found.levels, labels(found), strict=True):
        axes.plot(batches, [value(one) for one in level.speeds], "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel="batch", ylim=(0, None))
    axes.set_xticks(batches, map(str, batches))
