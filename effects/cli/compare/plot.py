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


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture, as PNG or SVG by the name of its file; as SVG, the same figures
    give the same file.
    """
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "minfer", "font.size": 9})
    figure: Any = Figure(figsize=SIZE, layout="constrained")
    figure.suptitle(f"{comparison.levels[0].model} on {comparison.device.name}")
    (memory, perplexity, divergence), lines = figure.subplots(2, 3)
    _bars(
        memory,
        comparison,
        "weights held, MiB",
        lambda level: level.memory.weights_held / MIB,
    )
    _bars(perplexity, comparison, "perplexity", lambda level: level.quality.perplexity)
    _bars(
        divergence,
        comparison,
        "KL divergence from the base, nats",
        lambda level: level.quality.kl_divergence or 0.0,
        _agreement,
    )
    _lines(lines[0], comparison, "TTFT, ms", lambda speed: speed.ttft * 1000)
    _lines(lines[1], comparison, "TPOT, ms", lambda speed: speed.tpot * 1000)
    _lines(lines[2], comparison, "output tokens/s", lambda speed: speed.throughput)
    lines[0].legend()
    date = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=date)


def _agreement(level: LevelResult) -> str:
    """Returns the text above a level's divergence."""
    share = level.quality.top1_agreement
    return "base" if share is None else f"top-1 {share:.1%}"


def _bars(
    axes: Any,
    comparison: Comparison,
    title: str,
    value: Callable[[LevelResult], float],
    text: Callable[[LevelResult], str] | None = None,
) -> None:
    """Draw a bar for each level, with its value or a text above it."""
    places = range(len(comparison.levels))
    values = [value(level) for level in comparison.levels]
    bars = axes.bar(places, values, color=[f"C{place}" for place in places])
    texts = [f"{number:.4g}" for number in values]
    if text is not None:
        texts = [text(level) for level in comparison.levels]
    axes.bar_label(bars, texts)
    axes.set(title=title, xticks=places, xticklabels=labels(comparison))
    axes.margins(y=0.15)


def _lines(
    axes: Any, comparison: Comparison, title: str, value: Callable[[Speed], float]
) -> None:
    """Draw a line for each level, over batches."""
    batches = comparison.load.batches
    for level, label in zip(comparison.levels, labels(comparison), strict=True):
        axes.plot(batches, [value(speed) for speed in level.speeds], "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel="batch", ylim=(0, None))
    axes.set_xticks(batches, map(str, batches))
