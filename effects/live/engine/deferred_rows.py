"""Deferred sampling: rows with a grammar are sampled by masks that the host makes while
the device runs.

A mask is a function of the tokens so far, so making the masks of a step begins when the
last token before it is known; the next step, whose inputs are the tokens of these rows,
is planned by then, and launched once they have been sampled:

    device   forward 1 ........ sample 1   forward 2 ........ sample 2   forward 3
    host       tokens 0, plan 2, masks 1     tokens 1, plan 3, masks 2

So the device waits for the host only where masks take longer than a forward. With more
steps in flight, a step may need tokens of one whose masks await tokens of another row:
its launch is delayed until these are there.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import compress

from attrs import define, field

from minfer.effects.execution.contract import Executor
from minfer.effects.live.masks import MaskMaker, StepMasks
from minfer.records.messages import Event, Finish
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.state import Transition


@define(eq=False)
class DeferredStep:
    """A launched step whose deferred rows wait for their masks."""

    plan: Plan
    # None: an earlier token is not known yet
    masks: "Future[StepMasks] | None" = None
    sampled: bool = False
    run_ids: frozenset[int] = field(init=False)  # of these rows

    def __attrs_post_init__(self) -> None:
        self.run_ids = frozenset(map(self.plan.run_ids.__getitem__, self.plan.deferred))

    def feeds(self, run_ids: Iterable[int]) -> bool:
        """Returns whether a row with these run ids needs a token that this step
        samples.
        """
        return not self.run_ids.isdisjoint(run_ids)

    @property
    def is_ready(self) -> bool:
        """Whether the masks are made."""
        return self.masks is not None and self.masks.done()


class DeferredSampling:
    """Launches an executor's steps in their order, and samples deferred rows once their
    masks are made. In the driver's thread.
    """

    def __init__(
        self, executor: Executor, masks: MaskMaker, post: Callable[[Event], None]
    ) -> None:
        """`post` gets the mask maker's events for the engine."""
        self.masks = masks
        self.steps: list[DeferredStep] = []  # in the order of their plans
        self.unlaunched: deque[Plan] = deque()  # that cannot be launched yet, in order
        self.executor = executor
        self._ends: list[Finish] = []
        self._last: Transition | None = None
        masks.listen(post)
        masks.use_memory(executor.mask_lines)

    def launch(self, plan: Plan) -> None:
        """Launch a plan, now or once all tokens that its decode rows need are sampled."""
        self.unlaunched.append(plan)
        self._launch_due()

    def observe(self, transition: Transition) -> None:
        """Note the engine's transition: discard the steps that it has discarded, begin
        masks, and launch what waited for them.
        """
        self._last = transition
        if self.steps or self.unlaunched:
            inflight = {plan.step for plan in transition.state.inflight}
            self.steps = [step for step in self.steps if step.plan.step in inflight]
            unlaunched = [plan for plan in self.unlaunched if plan.step in inflight]
            self.unlaunched = deque(unlaunched)
        self.masks.observe(transition)
        self._begin_masks()
        self._launch_due()

    def sample_step(self, number: int) -> None:
        """Sample a step's deferred rows, if it has any; waits for its masks."""
        for step in self.steps:
            if step.plan.step == number:
                self._sample(step)

    def sample_ready(self) -> None:
        """Sample the rows of all steps whose masks are made."""
        for step in self.steps:
            if step.is_ready:
                self._sample(step)
        self._drop_sampled()

    def take_ends(self) -> tuple[Finish, ...]:
        """Returns the ends that the mask maker has requested since the last call."""
        ends, self._ends = tuple(self._ends), []
        return ends

    def _launch_due(self) -> None:
        """Launch plans in their order, up to one that needs tokens of rows whose masks
        are not begun.
        """
        while self.unlaunched:
            plan = self.unlaunched[0]
            if any(
                step.masks is None and step.feeds(plan.run_ids) for step in self.steps
            ):
                return
            self.unlaunched.popleft()
            for step in self.steps:
                if step.is_ready or step.feeds(plan.run_ids):
                    self._sample(step)
            self._drop_sampled()
            self.executor.launch(plan)
            if plan.deferred:
                self.steps.append(DeferredStep(plan))
                self._begin_masks()

    def _begin_masks(self) -> None:
        """Begin the masks of steps without earlier tokens of their deferred rows in
        flight.
        """
        for step in self.steps:
            if (
                step.masks is None
                and self._last is not None
                and not self._awaits_tokens(step, self._last.state.inflight)
            ):
                step.masks = self.masks.begin(step.plan, self._last.state)

    @staticmethod
    def _awaits_tokens(step: DeferredStep, inflight: Iterable[Plan]) -> bool:
        """Returns whether an earlier plan in flight yields tokens for the step's deferred
        rows.
        """
        for plan in inflight:
            if plan.step >= step.plan.step:
                return False
            if not step.run_ids.isdisjoint(
                compress(plan.run_ids, plan.max_sampled_tokens)
            ):
                return True
        return False

    def _sample(self, step: DeferredStep) -> None:
        """Wait for a step's masks, and sample its deferred rows with them."""
        if step.sampled:
            return
        if step.masks is None:
            raise AssertionError(f"step {step.plan.step} awaits tokens before its masks")
        step.sampled = True
        step_masks = step.masks.result()
        self._ends += step_masks.ends
        self.executor.sample(
            SampleDeferred(step.plan.step, step_masks.masks, step_masks.written)
        )

    def _drop_sampled(self) -> None:
        self.steps = [step for step in self.steps if not step.sampled]
