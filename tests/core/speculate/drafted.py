"""A bench with drafts, and how many drafts each sample had."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve

from minfer.records.acceptance import Costs
from minfer.records.config import EngineConfig
from minfer.records.messages import Event, Execute, Executed, Propose, Submit
from minfer.records.plan import Plan
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, HOST, Speculation
from minfer.records.state import Transition
from minfer.simulation import oracle
from tests.core.lifecycle.test_pausing import Judged
from tests.core.test_engine import CONFIG

# What follows the known tokens of a sample, as a drafter guesses: of all of its tokens,
# and how many are known.
Guess = Callable[[tuple[int, ...], int], tuple[int, ...]]
ROOMY = evolve(CONFIG, depth=2, max_num_batched_tokens=64)
SOLO = evolve(ROOMY, depth=1)
FLAT = Costs(((64, 1.0),))  # drafts cost nothing
HOSTED = Speculation(drafter=HOST, drafts=4, adaptive=False)
ON_DEVICE = Speculation(drafter=DEVICE, drafts=4, adaptive=False)
BOTH = pytest.mark.parametrize("how", [HOSTED, ON_DEVICE], ids=["host", "device"])


def speculating(how: Speculation, config: EngineConfig = ROOMY) -> EngineConfig:
    return evolve(config, speculation=how)


def right(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
    """The next tokens."""
    return whole[known : known + 4]


def wrong(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
    """None of the next tokens."""
    return tuple((token + 1) % 50 for token in right(whole, known))


def nothing(whole: tuple[int, ...], known: int) -> tuple[int, ...]:
    del whole, known
    return ()


class Drafted(Judged):
    """Turns in which, behind each result, the host drafts for all that run."""

    def __init__(
        self, how: Speculation, guess: Guess = right, config: EngineConfig = ROOMY
    ) -> None:
        super().__init__(speculating(how, config))
        self.guess = guess

    def turn(self, *events: Event) -> Transition:
        done = (self.oracle.collect(),) if self.oracle.plans else ()
        return self.give(*done, *self.proposals(done), *events)

    def proposals(self, done: tuple[Any, ...] = ()) -> list[Propose]:
        """What the host drafts behind these results."""
        how, run = self.config.speculation, self.state.running
        if how is None or how.drafter != HOST:
            return []
        known = dict(zip(run.ids, run.known, strict=True))
        names = dict(zip(run.run_ids, run.ids, strict=True))
        for event in done:
            if isinstance(event, Executed):
                gens = self.state.inflight[0].run_ids
                for gen, tokens in zip(gens, event.yields, strict=True):
                    if gen in names:
                        known[names[gen]] += len(tokens)
        emitted = {
            name: self.guess(self.whole(name), count) for name, count in known.items()
        }
        return [
            Propose(*name, known[name], some) for name, some in emitted.items() if some
        ]

    def whole(self, name: SampleId) -> tuple[int, ...]:
        """All tokens of a sample, to come as well."""
        run = self.state.running
        request = run.seqs[run.ids.index(name)].request
        return (*request.prompt, *request.output, *self.right(request, name[1]))

    @property
    def deep(self) -> int:
        """Steps in flight."""
        return len(self.state.inflight)

    def drafts(self, plan: Plan) -> dict[str, int]:
        """Who of those that still run has how many drafts in a plan."""
        here = dict(zip(self.state.running.run_ids, self.state.running.ids, strict=True))
        return {
            here[plan.run_ids[one.index]][0]: plan.num_scheduled_tokens[one.index] - 1
            for one in plan.drafts
            if plan.run_ids[one.index] in here
        }


def planned(turn: Transition) -> list[Plan]:
    return [c.plan for c in turn.commands if isinstance(c, Execute)]


def begun(
    how: Speculation,
    *requests: Request,
    guess: Guess = right,
    config: EngineConfig = ROOMY,
    turns: int = 0,
) -> Drafted:
    """A bench whose requests have been submitted, and so many turns after that."""
    bench = Drafted(how, guess, config)
    bench.turn(*map(Submit, requests))
    for _ in range(turns):
        bench.turn()
    return bench


@contextmanager
def model_wrong(one_in: int) -> Iterator[None]:
    """A draft model of whose drafts one in so many is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "DRAFTS_PER_ERROR", one_in)
        yield
