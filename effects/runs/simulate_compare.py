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
    "figures that do not differ, about one is called higher or lower. By how much is "
    "said of a difference below 1% of the first row. Medians of differences are not "
    "differences of medians"
)
_MORE_DECIMALS: Final = 6  # at most, of a difference
_SMALL: Final = 0.01  # of the first row: a difference whose size the verdict says


@frozen
class ComparedFigure:
    """A figure by which policies are compared."""

    title: str
    path: tuple[str, ...]  # in the figures
    decimals: int
    kind: str = "f"  # of format: a number, or a share in %

    def text(self, value: float, more: int = 0, sign: str = "") -> str:
        """A value with the figure's decimals, and `more`."""
        return f"{value:{sign}z,.{self.decimals + more}{self.kind}}"


COMPARED: Final = (
    ComparedFigure("tok/s", ("tokens_per_second",), 0),
    ComparedFigure("TTFT p50", ("ttft", "p50"), 4),
    ComparedFigure("TTFT p99", ("ttft", "p99"), 4),
    ComparedFigure("TPOT p50", ("tpot", "p50"), 5),
    ComparedFigure("TPOT p99", ("tpot", "p99"), 5),
    ComparedFigure("ITL p99", ("itl", "p99"), 5),
    ComparedFigure("good", ("good",), 2, "%"),
    ComparedFigure("good/s", ("goodput",), 3),
    ComparedFigure("hits", ("hit_share",), 2, "%"),
    ComparedFigure("preempted", ("preemptions",), 0),
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

    @property
    def small_size(self) -> str:
        """The size of a difference that is no noise, if it is small."""
        base = abs(self.baseline.median)
        share = abs(self.difference.median) / base if base else 1.0
        if not self.difference.excludes_zero or share >= _SMALL:
            return ""
        size = f"{share:.2%}"
        return f", by {'less than 0.01%' if size == '0.00%' else size}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The median and the ends of the interval, with as many decimals as it takes that
        ends do not look like 0: both, or of noise one.
        """
        gap = self.difference
        ends = [end for end in (gap.low, gap.high) if end]
        texts = tuple[str, ...]()
        for more in range(_MORE_DECIMALS + 1):
            values = (gap.median, gap.low, gap.high)
            texts = tuple([self.figure.text(value, more, "+") for value in values])
            seen = [_looks_like_zero(self.figure.text(end, more)) for end in ends]
            if not (all(seen) if self.verdict == "noise" else any(seen)):
                break
        return texts


def _looks_like_zero(text: str) -> bool:
    return not any(digit in text for digit in "123456789")


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
                yield ComparedFigure(title, path, 4)


def difference_lines(name: str, found: list[Difference], seeds: int) -> Iterator[str]:
    """Lines that compare a case, called `name`, with the first."""
    yield f"{name}:"
    width = max(len(difference.figure.title) for difference in found)
    for difference in found:
        median_text, low, high = difference.texts
        base = difference.figure.text(difference.baseline.median)
        higher = seeds - difference.lower - difference.equal
        yield (
            f"  {difference.figure.title:<{width}}  {base:>10}  {median_text:>10}  "
            f"[{low}, {high}]  {difference.verdict}{difference.small_size}"
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
