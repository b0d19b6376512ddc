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
from minfer.effects.setup.speculation_settings import DRAFT_MODEL, NGRAM, SUFFIX
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import ASSUMED, Guesses
from minfer.values.checks import ConfigError

# Who drafts, by the names of methods.
DRAFTERS: Final = {NGRAM: HOST, SUFFIX: HOST, DRAFT_MODEL: DEVICE}

HOW_MANY: Final = "--speculative-method needs --num-speculative-tokens: how many drafts"


def add_draft_options(add: Callable[..., Any], several: str = "") -> None:
    """Add the options to a parser, or a group of one; where several numbers may be given,
    `several` describes the result.
    """
    add(
        "--num-speculative-tokens",
        type=_numbers if several else _number,
        metavar="N,.." if several else "N",
        help="; ".join(
            filter(None, ("drafts of a row in a step, at most; 0: none", several))
        ),
    )
    add(
        "--speculative-method",
        choices=DRAFTERS,
        help="who says them: what is looked up, or a draft model; ngram and suffix are "
        "the same here, where nothing is looked up: --acceptance-rate tells them apart "
        "(default: as in the recorded run, else ngram)",
    )
    add(
        "--acceptance-rate",
        type=_rate,
        metavar="RATE",
        help="of a draft, if all before it are accepted "
        f"(default: as recorded, if there is a record of it; else {ASSUMED:g})",
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
    return [_number(part) for part in text.split(",")]


def _rate(text: str) -> float:
    try:
        return Guesses(float(text)).rate
    except ValueError:  # ConfigError too
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate from 0 to 1") from None


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return found


def with_drafts(
    config: EngineConfig, drafts: int, method: str | None, cost: CostModel
) -> EngineConfig:
    """A configuration with so many drafts at most. Raises ConfigError.

    Its other settings of speculation stay. Where none are given, the number of drafts is
    the one that pays by the costs of steps.
    """
    if not drafts:
        return evolve(config, speculation=None)
    was = config.speculation
    drafter = DRAFTERS[method] if method else was.drafter if was else HOST
    if was is not None:
        return evolve(config, speculation=evolve(was, drafts=drafts, drafter=drafter))
    most = config.max_num_seqs * (1 + drafts) + config.max_num_batched_tokens
    how = Speculation(drafter=drafter, drafts=drafts, costs=cost.costs(most))
    return evolve(config, speculation=how)


def cases_with_drafts(
    cases: Iterable[Case], options: argparse.Namespace, cost: CostModel
) -> list[Case]:
    """All cases with all requested numbers of drafts. Raises ConfigError."""
    numbers, method = options.num_speculative_tokens, options.speculative_method
    every = [*cases]
    if numbers is None and method is not None:
        if any(case.config.speculation is None for case in every):
            raise ConfigError(HOW_MANY)
        numbers = [case.config.speculation.drafts for case in every[:1]]  # type: ignore[union-attr]  # just looked at
    if numbers is None:
        return every
    return [
        evolve(case, config=with_drafts(case.config, number, method, cost))
        for case, number in product(every, numbers)
    ]


def draft_results(options: argparse.Namespace, trace: ArrivalTrace) -> Guesses:
    """The results of drafts: as in the trace's run, if it had some."""
    rate = options.acceptance_rate
    if trace.drafts is not None and trace.drafts.judged:
        return trace.drafts.guesses(rate)
    return Guesses() if rate is None else Guesses(rate)


def with_draft_cost(options: argparse.Namespace, cost: CostModel) -> CostModel:
    """The cost model with the cost of a draft, if that is given."""
    each = options.draft_cost
    return cost if each is None else evolve(cost, draft=each)


def free_draft_remark(how: Speculation | None, cost: CostModel) -> str:
    """A remark that a draft model costs nothing, if no option gives its cost."""
    if how is None or how.drafter != DEVICE or cost.draft:
        return ""
    return "; its draft model takes no time, as --draft-cost says nothing else"


def draft_remarks(
    cases: Iterable[Case],
    options: argparse.Namespace,
    guesses: Guesses,
    cost: CostModel,
) -> str:
    """Remarks on the assumptions about drafts; empty if there are none."""
    hows = [how for case in cases if (how := case.config.speculation) is not None]
    if not hows:
        return ""
    first, why = "", "assumed; --acceptance-rate says otherwise"
    if options.acceptance_rate is not None:
        why = "as --acceptance-rate says"
    elif guesses.said:
        first, why = "those with a recorded result keep it; of others ", "as there"
    return (
        f"drafts: {first}each is accepted with probability {guesses.rate:.2g} if those "
        f"before it are ({why}){free_draft_remark(hows[0], cost)}; "
        "accepted, of those proposed; length, tokens of a row with drafts"
    )
