"""The ablation as a picture: how many times better each figure is with a mechanism."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.results import canvas

FIGURES: Final = {"throughput": "output tokens/s", "ttft": "TTFT", "itl": "ITL, median"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write the picture of results by row."""
    names = list(results)[::-1]
    figure = canvas(10, 1 + 0.38 * len(names))
    for axes, (key, title) in zip(
        figure.subplots(1, len(FIGURES), sharey=True), FIGURES.items(), strict=True
    ):
        worth = [results[name]["worth"][key] for name in names]
        middle = [ratio["median"] for ratio in worth]
        low = [ratio["median"] - ratio["low"] for ratio in worth]
        high = [ratio["high"] - ratio["median"] for ratio in worth]
        colours = ["C0" if value >= 1 else "C3" for value in middle]
        # Bars begin at 1, where a mechanism changes nothing.
        bars = axes.barh(
            range(len(names)),
            [value - 1 for value in middle],
            left=1,
            color=colours,
            xerr=[low, high],
            capsize=2,
        )
        axes.bar_label(bars, [f"{value:.2f}" for value in middle], padding=3)
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.margins(x=0.2)
        axes.set(title=f"{title}: times better with it", yticks=range(len(names)))
        axes.set_yticklabels(names)
    figure.savefig(path, metadata={"Date": None})
