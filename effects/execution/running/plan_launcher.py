"""Launches a plan, and reads its results.

A plan's changes of rows and blocks go to the model runner (`runner.py`). Its forwards are
packed (`pack_plan.py`), and the runner runs them one after the other, each with a slot of
host memory for its tokens (`read_back.py`). If it has rows with deferred sampling, its
forward keeps their logits; they are sampled when `sample` is called
(`deferred_sampling.py`), and other rows do not wait for that.
"""

import torch
from attrs import define, field

from minfer.effects.execution.contract import ExecutorError, UnsupportedPlanError
from minfer.effects.execution.device.streams import on
from minfer.effects.execution.packing.catching_up import CatchUp
from minfer.effects.execution.packing.pack_plan import Draw, Forward, Packer
from minfer.effects.execution.packing.read_back import HostSlot, SlotRing, results
from minfer.effects.execution.packing.verified import unsupported_drafts
from minfer.effects.execution.running.deferred_sampling import DeferredPacker
from minfer.effects.execution.running.runner import ModelRunner
from minfer.records.config import EngineConfig
from minfer.records.messages import Executed
from minfer.records.plan import Copy, Plan, SampleDeferred
from minfer.records.request import MEAN, POOLINGS


@define(eq=False)
class LaunchedPlan:
    """A launched plan: where its results will be, or why it could not be launched."""

    plan: Plan
    # one for each forward, and for deferred draws
    slots: list[HostSlot] = field(factory=list)
    error: str = ""
    # rows with deferred sampling, once their logits are kept
    deferred: Draw | None = None
    command: SampleDeferred | None = None  # of these; None: the host has not sent it yet
    # of these, whose rows had new owners by then
    reassigned: list[int] = field(factory=list)

    def fail(self, error: Exception) -> None:
        """Note why it failed; with the error's type if it is not an executor's own."""
        self.error = str(error) if isinstance(error, ExecutorError) else repr(error)


def unsupported_request(plan: Plan, config: EngineConfig) -> str:
    """Returns what a plan asks for that cannot be executed, or nothing."""
    groups = len(config.groups)
    tables = [len(opened.tables) == groups for opened in plan.opens]
    grown = len(config.block_groups)
    if not all(tables) or any(grow.group >= grown for grow in plan.grows):
        return f"rows of this model have {groups} block table(s), a group of layers each"
    if reason := _unsupported_states(plan, config.state_pages):
        return reason
    if any(opened.adapter_slot >= config.adapter_slots for opened in plan.opens):
        return f"there are {config.adapter_slots} slots of adapters"
    for opened in plan.opens:
        if opened.pooling and opened.pooling not in POOLINGS:
            return (
                f"prompts are pooled by {' or '.join(POOLINGS)}, not {opened.pooling!r}"
            )
        if opened.pooling == MEAN and plan.starts[opened.index]:
            return "a mean is over a whole prompt, and this row begins in the middle"
    return ""


def _unsupported_states(plan: Plan, pages: int) -> str:
    """Returns what is wrong with a plan's states, of `pages` pages each, or nothing."""
    if not pages:
        return "this model has no recurrent layers to save" if plan.saves else ""
    if any(len(opened.tables[-1]) < pages for opened in plan.opens):
        return f"the working state of a row takes {pages} pages"
    if any(len(save.pages) != pages for save in plan.saves):
        return f"a state takes {pages} pages"
    return ""


class PlanLauncher:
    """Launches plans by a runner, in order."""

    def __init__(self, runner: ModelRunner) -> None:
        config = runner.config
        self.runner = runner
        self.stages = runner.ranks.rank_info.parallel.pipeline
        has_draft_model = runner.draft_model is not None
        self.packer = Packer(
            runner.rows,
            runner.padded,
            runner.drafts,
            keeps_previous=has_draft_model,
            separates_drafts=runner.separates_drafts,
        )
        self.deferred_packer = DeferredPacker(runner.rows, runner.padded)
        # A plan takes a slot for each of at most two forwards; or two for one forward
        # with deferred sampling. With stages there is a plan for each micro-batch.
        plans = (config.depth + 1) * self.stages
        slots = plans * 2 + 1
        # What a draft model's cache lacks of rows, if there is a draft model; it takes a
        # slot.
        self.catch_up: CatchUp | None = None
        if has_draft_model:
            budget, size = config.max_num_batched_tokens, config.block_size
            self.catch_up = CatchUp(budget, size)
            slots += config.depth + 1
        self.ring = SlotRing(slots, runner.max_words, runner.lines, runner.backend.device)

    def launch(self, launched: LaunchedPlan) -> None:
        """Launch all of a plan but its deferred draws. Raises UnsupportedPlanError."""
        plan = launched.plan
        spec_config, rows = self.runner.config.speculation, self.runner.rows
        room = self.packer.drafts
        reason = unsupported_request(plan, self.runner.config)
        reason = reason or unsupported_drafts(
            plan, spec_config, rows, room, has_drafter=self.runner.drafter is not None
        )
        if reason:
            raise UnsupportedPlanError(f"step {plan.step}: {reason}")
        sampler = self.runner.sampler
        sampler.receive(plan.step - self.stages)  # of the same micro-batch
        self.runner.apply_changes(plan)
        if self.catch_up is not None and (chunks := self.catch_up.start(plan)):
            self.runner.catch_up(chunks, self.ring.next())
        for forward in self.packer.forwards(plan):
            slot = self.ring.next()
            launched.slots.append(slot)
            launched.deferred = forward.deferred
            self.runner.run(forward, slot, self._saves(plan, forward))
            sampler.finish(plan.step, forward.shape.lines)
        self._end_step(plan)

    def _end_step(self, plan: Plan) -> None:
        """Log the unprepared work of a plan's launches."""
        owners = self.runner.rows.owners
        self.runner.unprepared.end_step(plan.step, (owners[row] for row in plan.rows))

    def _saves(self, plan: Plan, forward: Forward) -> list[Copy]:
        """Returns the copies of pages that save a plan's states after its last forward;
        others are kept inside chunks.
        """
        if not forward.is_last:
            return []
        size, rows = self.runner.config.block_size, self.runner.rows
        return [
            Copy(source, target, size)
            for save in plan.saves
            if not save.inside
            for source, target in zip(
                rows.state_of(plan.rows[save.index]), save.pages, strict=True
            )
        ]

    def sample(self, launched: LaunchedPlan) -> None:
        """Launch a plan's deferred draws."""
        if launched.deferred is None or launched.command is None:
            return
        draws = self.deferred_packer.pack(
            launched.plan, launched.deferred, launched.command
        )
        launched.reassigned = draws.reassigned
        if not draws.draw.entries:
            self.runner.sampler.masks.forget(draws.step)
            return
        slot = self.ring.next()
        launched.slots.append(slot)
        self.runner.run_deferred(draws, slot)
        self.runner.sampler.finish(launched.plan.step, draws.shape.lines)
        self._end_step(launched.plan)

    def results(self, launched: LaunchedPlan, *, receives: bool) -> Executed:
        """Wait for a plan's results. Raises ExecutorError, also where deferred rows were
        not sampled. `receives`: with several stages, receive its tokens before that.
        """
        if launched.plan.deferred and launched.command is None:
            raise ExecutorError(
                f"the host has not allowed that the deferred rows of step "
                f"{launched.plan.step} are sampled"
            )
        if receives:
            self.receive(launched.plan.step)
        vocab = self.runner.spec.vocab_size
        executed = results(launched.plan, launched.slots, vocab, launched.reassigned)
        if self.catch_up is not None:
            self.catch_up.note_results(launched.plan, executed.yields)
        return executed

    def receive(self, step: int) -> None:
        """Receive the tokens of a step from the last stage, if this is an earlier one;
        steps in order.
        """
        with torch.inference_mode(), on(self.runner.stream):
            self.runner.sampler.receive(step)

    def forget(self) -> None:
        """Drop what has not been launched, after a failed plan."""
        self.packer.forget()
        if self.catch_up is not None:
            self.catch_up.forget()
        self.runner.forget()
        self.runner.sampler.masks.forget()
