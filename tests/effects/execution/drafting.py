"""Speculation around the torch executor: proposals of a host that knows the answers, and
what became of drafts.
"""

import random
from collections.abc import Callable
from typing import Any

from attrs import define, field

from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.head_model import LoadedHead
from minfer.effects.live.engine.host_drafts import HostDrafts
from minfer.records.messages import Executed, Failed
from minfer.records.plan import Plan
from minfer.records.sequence import SampleId
from minfer.records.speculation import DEVICE, HOST, SAME_NOISE, Speculation
from minfer.speculate.proposer import Proposal
from tests.effects.execution.tiny_engine import VOCAB, Model, Run, Tokens


def speculation(drafter: str, drafts: int, rule: str = SAME_NOISE) -> Speculation:
    """As many drafts as may be, always."""
    return Speculation(drafter=drafter, drafts=drafts, rule=rule, adaptive=False)


def watch_steps(run: Run, done: Callable[[Plan, Executed | Failed], object]) -> None:
    """Have `done` called with what goes to the executor of a run, and with what comes
    back.
    """
    executor: Any = run.driver.executor
    launch, collect = executor.launch, executor.collect
    plans: dict[int, Plan] = {}

    def launched(plan: Plan) -> None:
        plans[plan.step] = plan
        launch(plan)

    def collected() -> Executed | Failed:
        result: Executed | Failed = collect()
        done(plans.pop(result.step), result)
        return result

    executor.launch, executor.collect = launched, collected


@define
class Tally:
    """Counts the drafts that an executor was told to verify, and those it accepted."""

    proposed: int = 0
    accepted: int = 0

    def add(self, plan: Plan, result: Executed | Failed) -> None:
        """A step is done."""
        if isinstance(result, Failed):
            return
        for draft in plan.drafts:
            self.proposed += plan.num_scheduled_tokens[draft.index] - 1
            self.accepted += len(result.yields[draft.index]) - 1


@define
class Guesses:
    """A proposer that knows what will come, and says it mostly right."""

    answers: Tokens
    right: float  # the share of its tokens that are
    rng: random.Random
    texts: dict[SampleId, list[int]] = field(factory=dict)
    prompts: dict[SampleId, int] = field(factory=dict)

    def start(self) -> None:
        """It keeps what it knows itself."""

    def began(self, state: None, device_rows: SampleId, scope: Any, prompt: int) -> None:
        del state, scope
        self.texts[device_rows], self.prompts[device_rows] = [], prompt

    def grew(self, state: None, device_rows: SampleId, tokens: tuple[int, ...]) -> None:
        del state
        self.texts[device_rows] += tokens

    def ended(self, state: None, device_rows: SampleId) -> None:
        del state, self.texts[device_rows]

    def propose(self, state: None, device_rows: SampleId, max_tokens: int) -> Proposal:
        del state
        count = self.rng.randrange(max_tokens + 1)
        begin = len(self.texts[device_rows]) - self.prompts[device_rows]
        coming = self.answers[device_rows][begin:][:count]
        return Proposal(tuple(map(self._emitted, coming)))

    def _emitted(self, token: int) -> int:
        return token if self.rng.random() < self.right else self.rng.randrange(VOCAB)


def guessing(
    model: Model, answers: Tokens, right: float, max_drafts: int, **settings: Any
) -> tuple[Run, Tally]:
    """A run whose host drafts; `rule`: of acceptance."""
    spec_config = speculation(HOST, max_drafts, settings.pop("rule", SAME_NOISE))
    run = Run.start(model, speculation=spec_config, **settings)
    guesses = Guesses(answers, right, random.Random(max_drafts))
    run.driver.drafts = HostDrafts(run.config, guesses)
    tally = Tally()
    watch_steps(run, tally.add)
    return run, tally


def drafting(
    model: Model, draft: LoadedDraft | LoadedHead, drafts: int, **settings: Any
) -> tuple[Run, Tally]:
    """A run whose executor drafts; `rule`: of acceptance."""
    spec_config = speculation(DEVICE, drafts, settings.pop("rule", SAME_NOISE))
    run = Run.start(model, draft=draft, speculation=spec_config, **settings)
    tally = Tally()
    watch_steps(run, tally.add)
    return run, tally
