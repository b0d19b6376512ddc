"""Drafts in simulations: who proposes them, how many, and how many are accepted.

Nothing is computed in a simulation, so it is not known whether a draft is right: the user
gives the acceptance rate, and each draft is accepted or rejected by its own coin
(`minfer.simulation.guesses`). A draft model's forwards cost what the user gives; the
host's lookups cost nothing, but no step can be planned ahead of them. Methods of lookup
differ only in their acceptance rates: "ngram" and "suffix" are the same here but for the
rate.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Final

from attrs import evolve

from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.simulate_options import Case
from minfer.effects.setup.speculation_settings import DRAFT_MODEL, HEADS, LOOKUPS
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import DEFAULT_RATE, Guesses
from minfer.values.checks import ConfigError

# Who drafts, by the names of methods.
DRAFTERS: Final = {
    **dict.fromkeys(LOOKUPS, HOST),
    **dict.fromkeys((DRAFT_MODEL, *HEADS), DEVICE),
}

DRAFTS_NEEDED: Final = (
    "--speculative-method needs --num-speculative-tokens: how many drafts"
)


def add_draft_options(add: Callable[..., Any], list_help: str = "") -> None:
    """Add the options to a parser, or a group of one; where several numbers may be given,
    `list_help` describes the result.
    """
    add(
        "--num-speculative-tokens",
        type=_numbers if list_help else _number,
        metavar="N,.." if list_help else "N",
        help="; ".join(
            filter(None, ("drafts of a row in a step, at most; 0: none", list_help))
        ),
    )
    add(
        "--speculative-method",
        choices=DRAFTERS,
        help="who says them: what is looked up, or a draft model or head; ngram and "
        "suffix are the same here, where nothing is looked up, as are the others: "
        "--acceptance-rate tells them apart (default: as in the recorded run, else "
        "ngram)",
    )
    add(
        "--acceptance-rate",
        type=_rate,
        metavar="RATE",
        help="of a draft, if all before it are accepted "
        f"(default: as recorded, if there is a record of it; else {DEFAULT_RATE:g})",
    )
    add(
        "--draft-cost",
        type=_seconds,
        metavar="SECONDS",
        help="a forward of the draft model (default: as the cost model says)",
    )


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")


def _numbers(text: str) -> list[int]:
    return [_number(number) for number in text.split(",")]


def _rate(text: str) -> float:
    try:
        return Guesses(float(text)).rate
    except ValueError:  # ConfigError too
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 0 to 1") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return seconds


def with_drafts(
    config: EngineConfig, drafts: int, method: str | None, cost: CostModel
) -> EngineConfig:
    """A configuration with at most `drafts` drafts. Raises ConfigError.

    Its other settings of speculation stay. Where none are given, the number of drafts is
    the one that pays by the costs of steps.
    """
    if not drafts:
        return evolve(config, speculation=None)
    current = config.speculation
    drafter = DRAFTERS[method] if method else current.drafter if current else HOST
    if current is not None:
        return evolve(config, speculation=evolve(current, drafts=drafts, drafter=drafter))
    max_tokens = config.max_num_seqs * (1 + drafts) + config.max_num_batched_tokens
    speculation = Speculation(
        drafter=drafter, drafts=drafts, costs=cost.costs(max_tokens)
    )
    return evolve(config, speculation=speculation)


def cases_with_drafts(
    cases: Iterable[Case], options: argparse.Namespace, cost: CostModel
) -> list[Case]:
    """All cases with all requested numbers of drafts. Raises ConfigError."""
    numbers, method = options.num_speculative_tokens, options.speculative_method
    all_cases = [*cases]
    if numbers is None and method is not None:
        if any(case.config.speculation is None for case in all_cases):
            raise ConfigError(DRAFTS_NEEDED)
        numbers = [case.config.speculation.drafts for case in all_cases[:1]]  # type: ignore[union-attr]  # just looked at
    if numbers is None:
        return all_cases
    return [
        evolve(case, config=with_drafts(case.config, number, method, cost))
        for case, number in product(all_cases, numbers)
    ]


def draft_results(options: argparse.Namespace, trace: ArrivalTrace) -> Guesses:
    """The results of drafts: as in the trace's run, if it had some."""
    rate = options.acceptance_rate
    if trace.drafts is not None and trace.drafts.num_tried:
        return trace.drafts.guesses(rate)
    return Guesses() if rate is None else Guesses(rate)


def with_draft_cost(options: argparse.Namespace, cost: CostModel) -> CostModel:
    """The cost model with the cost of a draft, if that is given."""
    draft_seconds = options.draft_cost
    return cost if draft_seconds is None else evolve(cost, draft=draft_seconds)


def free_draft_remark(speculation: Speculation | None, cost: CostModel) -> str:
    """A remark that a draft model costs nothing, if no option gives its cost."""
    if speculation is None or speculation.drafter != DEVICE or cost.draft:
        return ""
    return "; its draft model takes no time, as --draft-cost says nothing else"


def draft_remarks(
    cases: Iterable[Case],
    options: argparse.Namespace,
    guesses: Guesses,
    cost: CostModel,
) -> str:
    """Remarks on the assumptions about drafts; empty if there are none."""
    speculations = [
        speculation
        for case in cases
        if (speculation := case.config.speculation) is not None
    ]
    if not speculations:
        return ""
    first, reason = "", "assumed; --acceptance-rate says otherwise"
    if options.acceptance_rate is not None:
        reason = "as --acceptance-rate says"
    elif guesses.facts:
        first, reason = "those with a recorded result keep it; of others ", "as there"
    return (
        f"drafts: {first}each is accepted with probability {guesses.rate:.2g} if those "
        f"before it are ({reason}){free_draft_remark(speculations[0], cost)}; "
        "accepted, of those proposed; length, tokens of a row with drafts"
    )
