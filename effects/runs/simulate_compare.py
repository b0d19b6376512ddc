"""Which differences between simulated policies are noise: many seeds, one table.

Each seed has its own load (`resampled`), the same for all policies. The table has the
median of each figure over the seeds; below it are the differences from the first policy,
paired by seed, with intervals (`minfer.analysis.paired`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

from attrs import frozen

from minfer.analysis.paired import (
    MedianInterval,
    median_interval,
    paired_difference,
)

Figures = dict[str, Any]
METHOD: Final = (
    "differences from the first row, paired by seed: the median, and an interval that "
    "covers it in 95% of cases (sign test); noise: the interval has 0 in it. Of 20 "
    "figures that do not differ, about one is called higher or lower"
)


@frozen
class ComparedFigure:
    """A figure by which policies are compared."""

    title: str
    path: tuple[str, ...]  # in the figures
    form: str  # as a format


COMPARED: Final = (
    ComparedFigure("tok/s", ("tokens_per_second",), ",.0f"),
    ComparedFigure("TTFT p50", ("ttft", "p50"), ".4f"),
    ComparedFigure("TTFT p99", ("ttft", "p99"), ".4f"),
    ComparedFigure("TPOT p50", ("tpot", "p50"), ".5f"),
    ComparedFigure("TPOT p99", ("tpot", "p99"), ".5f"),
    ComparedFigure("ITL p99", ("itl", "p99"), ".5f"),
    ComparedFigure("good", ("good",), ".2%"),
    ComparedFigure("good/s", ("goodput",), ".3f"),
    ComparedFigure("hits", ("hit_share",), ".2%"),
    ComparedFigure("preempted", ("preemptions",), ",.0f"),
)
_BY_GROUP: Final = ("p50", "p99")


@frozen
class Difference:
    """How a figure of a policy differs from that of the first policy."""

    figure: ComparedFigure
    baseline: MedianInterval
    difference: MedianInterval
    lower: int  # seeds in which the value is lower than the baseline's
    equal: int  # seeds in which it is the same

    @property
    def verdict(self) -> str:
        """`lower`, `higher`, `noise` or `equal`."""
        if self.difference.low == self.difference.high == 0:
            return "equal"
        if not self.difference.excludes_zero:
            return "noise"
        return "lower" if self.difference.median < 0 else "higher"


def value_at(figures: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """A value in figures, or None if it is not there."""
    found: Any = figures
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def differences(baseline: list[Figures], others: list[Figures]) -> list[Difference]:
    """The differences of the figures that all runs have, seed by seed."""
    found = []
    for figure in (*COMPARED, *_grouped(baseline)):
        pairs = [
            (value_at(base, figure.path), value_at(other, figure.path))
            for base, other in zip(baseline, others, strict=True)
        ]
        if any(value is None for pair in pairs for value in pair):
            continue
        before, after = ([*column] for column in zip(*pairs, strict=True))
        found.append(
            Difference(
                figure,
                median_interval(before),
                paired_difference(before, after),
                sum(b > a for b, a in pairs),
                sum(b == a for b, a in pairs),
            )
        )
    return found


def _grouped(runs: list[Figures]) -> Iterator[ComparedFigure]:
    """The figures by client, priority and deadline."""
    for name, groups in runs[0]["groups"].items():
        for value in groups:
            for q in _BY_GROUP:
                title = f"TTFT {q}, {name} {value or 'none'}"
                path = ("groups", name, value, "ttft", q)
                yield ComparedFigure(title, path, ".4f")


def difference_lines(name: str, found: list[Difference], seeds: int) -> Iterator[str]:
    """Lines that compare a case, called `name`, with the first."""
    yield f"{name}:"
    width = max(len(difference.figure.title) for difference in found)
    for difference in found:
        form, gap = difference.figure.form, difference.difference
        signed = [f"{value:+{form}}" for value in (gap.median, gap.low, gap.high)]
        base = f"{difference.baseline.median:{form}}"
        higher = seeds - difference.lower - difference.equal
        yield (
            f"  {difference.figure.title:<{width}}  {base:>10}  {signed[0]:>10}  "
            f"[{signed[1]}, {signed[2]}]  {difference.verdict}"
            f" (lower in {difference.lower} of {seeds}, higher in {higher})"
        )


def difference_figures(found: list[Difference]) -> list[Figures]:
    """The differences as JSON values."""
    return [
        {
            "figure": difference.figure.title,
            "path": ".".join(difference.figure.path),
            "baseline": difference.baseline.median,
            "median": difference.difference.median,
            "low": difference.difference.low,
            "high": difference.difference.high,
            "verdict": difference.verdict,
        }
        for difference in found
    ]


def medians(runs: list[Figures]) -> Figures:
    """One row for the runs of all seeds: the median of each number."""
    row = dict[str, Any]()
    for name, value in runs[0].items():
        values = [run[name] for run in runs if run.get(name) is not None]
        if isinstance(value, Counter):
            keys = {key for counter in values for key in counter}
            row[name] = Counter({key: median([v[key] for v in values]) for key in keys})
        elif values and all(isinstance(inner, Mapping) for inner in values):
            row[name] = medians([dict(inner) for inner in values])
        elif values and all(type(number) in (int, float) for number in values):
            row[name] = median(values)
        else:
            row[name] = value
    return row


def remarks(names: list[str], runs: list[list[Figures]]) -> Iterator[str]:
    """Sentences that a reader needs before comparing `runs`, by case and seed: that no
    request waited, or that two cases, called `names`, decided alike.
    """
    policies = {seeds[0]["policy"] for seeds in runs}
    waited = any(run["most_waiting"] for seeds in runs for run in seeds)
    if len(policies) > 1 and not waited:
        yield (
            "no request ever waited, in any run: no queue formed, so that scheduling "
            "policies cannot differ; a greater --speed, or fewer --num-blocks or "
            "--max-num-seqs, make one"
        )
    for later in range(1, len(runs)):
        for earlier in range(later):
            pairs = zip(runs[earlier], runs[later], strict=True)
            alike = [a["decisions"] == b["decisions"] for a, b in pairs]
            if any(alike):
                seeds = len(alike)
                of = "" if seeds == 1 else f" in {sum(alike)} of {seeds} seeds"
                yield (
                    f"{names[earlier]} and {names[later]} decided alike{of}: the same "
                    "admissions, preemptions and ends at the same times"
                )
