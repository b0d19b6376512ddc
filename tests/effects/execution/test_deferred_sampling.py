"""Rows with deferred sampling: as if they had none, but for what masks forbid."""

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from numpy.typing import NDArray

from minfer.effects.execution.contract import LogitsError
from minfer.effects.execution.device.device_rows import DeviceRows
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.pack_plan import Draw
from minfer.effects.execution.running.deferred_sampling import (
    DeferredDraws,
    DeferredPacker,
    MaskError,
    pack_deferred,
    write_masks,
)
from minfer.effects.execution.torch_executor import TorchExecutor
from minfer.records.messages import Discarded, Executed, Failed, Preempted
from minfer.records.plan import Mask, NewRow, Plan, PrefillTokens, SampleDeferred
from minfer.records.request import Request, SamplingParams
from minfer.sampling import reference_sampler as sample
from tests.circles import claimed
from tests.core.executing import opened
from tests.effects.execution.tiny_engine import (
    CUDA,
    GREEDY,
    VOCAB,
    Model,
    Run,
    Tokens,
    asking,
    check_scores,
    requests,
)
from tests.effects.masking import MasksBy

pytestmark = pytest.mark.usefixtures("device_kind")
EVERYTHING = b"\xff" * 13


@pytest.fixture(params=[False, True], ids=["in turn", "at once"])
def at_once(request: pytest.FixtureRequest) -> bool:
    """Whether what is launched runs at once, as on a GPU."""
    is_at_once: bool = request.param or CUDA
    return is_at_once


def start(model: Model, at_once: bool, **settings: Any) -> Run:
    run = Run.start(model, **settings)
    executor_of(run).runs_at_once |= at_once
    return run


def padded(shape: StepShape) -> StepShape:
    return shape.padded(8)


def executor_of(run: Run) -> TorchExecutor:
    executor = run.driver.executor
    assert isinstance(executor, TorchExecutor)
    return executor


def bound(wanted_requests: list[Request], step: int = 1) -> list[Request]:
    """Requests of which each, or one of so many, never runs ahead."""
    return [
        evolve(r, needs_host_mask=i % step == 0) for i, r in enumerate(wanted_requests)
    ]


def only(*tokens: int) -> bytes:
    """A mask that allows these."""
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


# --- masks that allow everything --------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("depth", "step"),
    [(1, 1), (2, 2), *claimed([(1, 2), (2, 1), (3, 1), (3, 2)])],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 17},
        {"num_blocks": 9},
    ],
    ids=str,
)
def test_tokens_are_the_same_without_steps_ahead(
    model: Model,
    reference: Tokens,
    settings: dict[str, int],
    depth: int,
    step: int,
    at_once: bool,
) -> None:
    run = start(model, at_once, **settings, depth=depth)
    if step == 2:
        run.driver.deferred.masks = MasksBy(
            lambda plan: tuple(Mask(i, EVERYTHING) for i in plan.deferred)
        )
    assert run.serve(bound(requests(0), step), arrival_gap=depth % 2) == reference
    assert not run.count(Discarded)
    if settings == {"num_blocks": 9}:
        assert run.count(Preempted)


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2])
def test_log_probabilities_are_those_of_the_model(
    model: Model, reference: Tokens, step: int, at_once: bool
) -> None:
    run, wanted_requests = start(model, at_once, num_blocks=20), asking(requests(0))
    assert run.serve(bound(wanted_requests, step), arrival_gap=1) == reference
    check_scores(model, run, wanted_requests)


@pytest.mark.long
def test_samples_of_one_request(model: Model, at_once: bool) -> None:
    sampling = SamplingParams(temperature=1.0, n=4)
    request = Request(
        id="n",
        prompt=(7,) * 13,
        max_tokens=9,
        n=4,
        sampling=sampling,
        seed=3,
        needs_host_mask=True,
    )
    tokens = start(model, at_once).serve([request])
    assert tokens == {("n", i): model.expected(request, i) for i in range(4)}


# --- masks that forbid ------------------------------------------------------------------


def forced(plan: Plan) -> tuple[Mask, ...]:
    """One token for each position."""
    positions = (
        (i, plan.starts[i] + plan.num_scheduled_tokens[i]) for i in plan.deferred
    )
    return tuple(Mask(i, only(7 * position % VOCAB)) for i, position in positions)


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_mask_that_allows_one_token_forces_it(
    model: Model,
    reference: Tokens,
    depth: int,
    late: bool,
    written: bool,
    at_once: bool,
) -> None:
    wanted_requests = [evolve(r, stop_ids=frozenset()) for r in asking(requests(0))]
    run = start(model, at_once, depth=depth)
    lend = executor_of(run).mask_lines if written else None
    run.driver.deferred.masks = MasksBy(forced, late=late, lend=lend)
    tokens = run.serve(bound(wanted_requests, 2), arrival_gap=depth - 1)
    for i, request in enumerate(wanted_requests):
        if i % 2 == 0:
            first = len(request.prompt)
            positions = range(first, first + request.max_tokens)
            expected = [7 * position % VOCAB for position in positions]
        else:
            expected = reference[request.id, 0]
        assert tokens[request.id, 0] == expected
    check_scores(model, run, wanted_requests)  # the model's own, whatever was allowed


@pytest.mark.long
def test_what_a_mask_leaves_is_drawn_as_ever(model: Model, at_once: bool) -> None:
    even = only(*range(0, VOCAB, 2))
    run = start(model, at_once)
    run.driver.deferred.masks = MasksBy(
        lambda plan: tuple(Mask(i, even) for i in plan.deferred)
    )
    wanted_requests = [evolve(r, stop_ids=frozenset()) for r in requests(0, 6)]
    tokens = run.serve(bound(wanted_requests))
    for request in wanted_requests:
        prefill = list(request.prompt)
        for token in tokens[request.id, 0]:
            logits = model.logits(prefill)
            logits[1::2] = [-np.inf] * len(logits[1::2])
            place = len(prefill)
            assert token == sample.draw(logits, request.sampling, request.seed, 0, place)
            prefill.append(token)


@pytest.mark.long
def test_others_have_their_tokens_before_the_masks_come(
    model: Model, reference: Tokens
) -> None:
    run = start(model, at_once=True)
    executor = executor_of(run)
    emitted_at = defaultdict[tuple[str, int], list[tuple[int, int]]](list)

    def draws(plan: Plan) -> tuple[Mask, ...]:
        launched = next(
            launched_plan
            for launched_plan in executor.launched_plans
            if launched_plan.plan is plan
        )
        draw = launched.slots[-1].draw
        assert draw is not None
        entries_with_owners = zip(draw.entries, draw.owners, strict=True)
        for (place, owner), token in zip(
            entries_with_owners, launched.slots[-1].tokens(draw), strict=True
        ):
            assert owner is not None
            assert place not in plan.deferred
            place_in_output = (
                plan.starts[place] + plan.num_scheduled_tokens[place] - owner.prompt
            )
            emitted_at[owner.name].append((place_in_output, token))
        return ()

    run.driver.deferred.masks = MasksBy(draws)
    assert run.serve(bound(requests(0), 2), arrival_gap=1) == reference
    assert sum(map(len, emitted_at.values())) > 20
    for name, emitted in emitted_at.items():
        assert all(reference[name][place] == token for place, token in emitted)


# --- what goes wrong --------------------------------------------------------------------


@pytest.mark.long
def test_a_mask_that_allows_nothing_fails_its_step(
    model: Model, reference: Tokens, at_once: bool
) -> None:
    run, calls = start(model, at_once), list[Plan]()

    def empty_once(plan: Plan) -> tuple[Mask, ...]:
        calls.append(plan)
        return (Mask(plan.deferred[0], bytes(13)),) if len(calls) == 5 else ()

    run.driver.deferred.masks = MasksBy(empty_once)
    assert run.serve(bound(requests(0), 2), arrival_gap=1) == reference
    [voided] = [reason for reason in run.reasons if isinstance(reason, Discarded)]
    assert "a mask allows no token for request 'r" in voided.error


@pytest.mark.long
def test_so_does_one_that_was_written_to_lent_memory(
    model: Model, reference: Tokens, at_once: bool
) -> None:
    run, calls = start(model, at_once), list[Plan]()

    def empty_once(plan: Plan) -> tuple[Mask, ...]:
        calls.append(plan)
        return (Mask(plan.deferred[0], bytes(13)),) if len(calls) == 5 else ()

    run.driver.deferred.masks = MasksBy(empty_once, lend=executor_of(run).mask_lines)
    assert run.serve(bound(requests(0), 2), arrival_gap=1) == reference
    [voided] = [reason for reason in run.reasons if isinstance(reason, Discarded)]
    assert "request 'r" in voided.error


@pytest.mark.long
def test_deferred_draws_that_fail_fail_their_step(
    model: Model, reference: Tokens, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    run, calls = start(model, at_once, num_blocks=20), 0
    sampler = executor_of(run).runner.sampler
    sample_kept = sampler.sample_kept

    def failing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        sample_kept(*arguments)
        if calls % 9 == 0:
            raise MemoryError

    monkeypatch.setattr(sampler, "sample_kept", failing)
    assert run.serve(bound(requests(0), 2), arrival_gap=1) == reference
    voided = [reason.error for reason in run.reasons if isinstance(reason, Discarded)]
    assert set(voided) == {"MemoryError()"}


def prefill(step: int, name: str, token: int, *, deferred: bool) -> Plan:
    """A plan that gives row 0 to a request with a prompt of one token."""
    request = Request(id=name, prompt=(token,), max_tokens=5, sampling=GREEDY)
    return Plan(
        step=step,
        run_ids=(step,),
        rows=(0,),
        starts=(0,),
        num_scheduled_tokens=(1,),
        max_sampled_tokens=(1,),
        fills=(PrefillTokens(0, request.prompt),),
        opens=(opened(request, (step,)),),
        deferred=(0,) if deferred else (),
    )


def test_a_reassigned_row_is_not_changed(model: Model) -> None:
    executor = executor_of(start(model, at_once=True))
    executor.launch(prefill(0, "gone", 5, deferred=True))
    executor.launch(prefill(1, "next", 9, deferred=False))
    executor.sample(SampleDeferred(0))
    executor.launch(Plan(2, (1,), (0,), (1,), (1,), (1,)))
    assert executor.collect() == Executed(0, ((0,),))
    request = Request(id="next", prompt=(9,), max_tokens=2, sampling=GREEDY)
    first, second = model.expected(request)
    assert executor.collect() == Executed(1, ((first,),))
    assert executor.collect() == Executed(2, ((second,),))


def test_a_failed_plan_leaves_earlier_plans_their_deferred_draws(model: Model) -> None:
    executor = executor_of(start(model, at_once=True))
    executor.launch(prefill(0, "a", 5, deferred=True))
    executor.launch(evolve(prefill(1, "b", 9, deferred=False), rows=(99,)))
    executor.sample(SampleDeferred(0))
    request = Request(id="a", prompt=(5,), max_tokens=1, sampling=GREEDY)
    assert executor.collect() == Executed(0, (tuple(model.expected(request)),))
    failed = executor.collect()
    assert isinstance(failed, Failed)
    executor.sample(SampleDeferred(1))  # which is not in flight any more


def test_missing_and_wrong_masks_are_errors(model: Model, at_once: bool) -> None:
    executor = executor_of(start(model, at_once))
    executor.launch(prefill(0, "a", 5, deferred=True))
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert (
        "the host has not allowed that the deferred rows of step 0 are sampled"
        in failed.error
    )
    executor.launch(prefill(1, "a", 5, deferred=True))
    executor.sample(SampleDeferred(1, (Mask(4, only(3)),)))
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert (
        "a mask is for entry 4 of step 1, whose sampling is not deferred" in failed.error
    )


def test_logits_that_are_not_finite_name_the_request(model: Model, at_once: bool) -> None:
    embed = model.weights.embed.clone()
    embed[VOCAB - 1] = torch.nan
    broken = Model(model.theirs, model.spec, evolve(model.weights, embed=embed))
    executor = executor_of(start(broken, at_once))
    executor.launch(prefill(0, "bad", VOCAB - 1, deferred=True))
    executor.sample(SampleDeferred(0))
    failed = executor.collect()
    assert isinstance(failed, Failed)
    assert failed.error == str(LogitsError(failed.error))
    assert "not finite for request 'bad' (sample 0)" in failed.error


# --- what is packed ---------------------------------------------------------------------


def rows_with(*names: str) -> tuple[DeviceRows, list[NewRow | None]]:
    rows = DeviceRows(4, 2, VOCAB, torch.device("cpu"))
    for row, name in enumerate(names):
        rows.open(row, opened(Request(id=name, prompt=(3,), max_tokens=2), (0,)))
    return rows, rows.owners[: len(names)]


PLAN = Plan(
    step=7,
    run_ids=(1, 2, 3),
    rows=(2, 0, 1),
    starts=(4, 5, 6),
    num_scheduled_tokens=(1, 3, 1),
    max_sampled_tokens=(1, 1, 1),
    deferred=(1, 2),
)


def pad(shape: StepShape) -> StepShape:
    return shape


def test_rows_and_positions_of_deferred_draws() -> None:
    rows, owners = rows_with("a", "b", "c")
    kept_draw = Draw([1, 2], [owners[0], owners[1]])
    draws = pack_deferred(PLAN, kept_draw, SampleDeferred(7), rows, pad)
    assert draws.words.reshape(2, -1)[:, :2].tolist() == [[0, 1], [8, 7]]
    assert (draws.draw.entries, draws.reassigned, draws.masks) == ([1, 2], [], [b"", b""])
    rows.open(0, opened(Request(id="new", prompt=(3,), max_tokens=2), (0,)))
    draws = pack_deferred(PLAN, kept_draw, SampleDeferred(7), rows, pad)
    assert (draws.draw.entries, draws.reassigned) == ([2], [1])
    assert draws.draw.owners == [owners[1]]


@pytest.mark.parametrize(
    ("places", "is_taken", "lines"),
    [([1, 2], False, [0, 1]), ([2, 1], False, [1, 0]), ([1, 2], True, [1])],
)
def test_where_masks_were_written_that_lie_in_lent_memory(
    places: list[int], is_taken: bool, lines: list[int]
) -> None:
    rows, owners = rows_with("a", "b", "c")
    kept_draw = Draw(places, [owners[PLAN.rows[place]] for place in places])
    if is_taken:
        rows.open(0, opened(Request(id="new", prompt=(3,), max_tokens=2), (0,)))
    draws = pack_deferred(PLAN, kept_draw, SampleDeferred(7, written=True), rows, pad)
    assert (draws.step, [*(draws.lines or ())], draws.masks) == (7, lines, [])
    assert pack_deferred(PLAN, kept_draw, SampleDeferred(7), rows, pad).lines is None


def test_deferred_draws_are_padded_with_the_scratch_row() -> None:
    rows, owners = rows_with("a", "b", "c")
    kept_draw = Draw([0, 1, 2], [owners[2], owners[0], owners[1]])
    draws = pack_deferred(PLAN, kept_draw, SampleDeferred(7), rows, padded)
    assert draws.shape == StepShape(decode_rows=0, draws=4, deferred_draws=True)
    assert draws.words.reshape(2, -1)[0].tolist() == [2, 0, 1, rows.scratch]


def test_what_stays_as_it_was_is_not_packed_again() -> None:
    """Step after step it is as if it were packed anew, whatever rows come and go."""
    rng = random.Random(0)
    rows, _ = rows_with("a", "b", "c")
    packer = DeferredPacker(rows, padded)
    kept_draw, deferred = Draw([], []), tuple[int, ...]()
    counts, fills = (1, 1, 1), tuple[PrefillTokens, ...]()
    reused = 0
    for step in range(400):
        starts = tuple(rng.randrange(9) for _ in range(3))
        # others, or in another order
        if not kept_draw.entries or rng.random() < 0.2 or fills:
            places = rng.sample(range(3), rng.randrange(1, 4))
            deferred = tuple(sorted(places))
            kept_draw = Draw(places, [rows.owners[PLAN.rows[place]] for place in places])
            counts, fills = (1, 1, 1), ()
            if (
                rng.random() < 0.3
            ):  # a chunk of a prompt, which is no step's kept draw twice
                counts, fills = (1, 3, 1), (PrefillTokens(1, (5, 6, 7)),)
        if rng.random() < 0.1:
            request = Request(id=f"new {step}", prompt=(3,), max_tokens=2)
            rows.open(rng.randrange(3), opened(request, (0,)))
        plan = evolve(
            PLAN,
            step=step,
            num_scheduled_tokens=counts,
            starts=starts,
            fills=fills,
            deferred=deferred,
        )
        command = SampleDeferred(step, written=rng.random() < 0.9)
        expected = pack_deferred(plan, kept_draw, command, rows, padded)
        before = packer._draws
        packed = packer.pack(plan, kept_draw, command)
        reused += before is not None and packed.draw is before.draw
        assert packed.words.tolist() == expected.words.tolist()
        assert (packed.step, packed.lines) == (step, expected.lines)
        assert (packed.shape, packed.reassigned, packed.masks) == (
            expected.shape,
            expected.reassigned,
            expected.masks,
        )
        assert packed.draw.entries == expected.draw.entries
        assert packed.draw.owners == expected.draw.owners
    assert 100 < reused < 380


def written(draws: DeferredDraws) -> NDArray[np.uint8]:
    """The bits of its masks, a line for each draw."""
    out = np.full((5, 4), 7, np.int32)
    count = write_masks(draws, VOCAB, out)
    assert (out[count:] == 7).all()
    return np.unpackbits(out[:count].view(np.uint8), axis=1, bitorder="little")


def test_bits_of_masks() -> None:
    rows, owners = rows_with("a", "b")
    kept_draw = Draw([1, 2], [*owners])
    bits = written(
        pack_deferred(PLAN, kept_draw, SampleDeferred(7, (Mask(2, b"\x03"),)), rows, pad)
    )
    assert bits.sum(1).tolist() == [VOCAB, 2]
    assert bits[1, :2].all()
    bits = written(
        pack_deferred(
            PLAN, kept_draw, SampleDeferred(7, (Mask(2, b"\xff" * 50),)), rows, pad
        )
    )
    assert bits[1].sum() == VOCAB
    for nothing in (b"\0", bytes(13), bytes(12) + b"\xe0"):
        with pytest.raises(MaskError, match="no token for request 'b' "):
            written(
                pack_deferred(
                    PLAN, kept_draw, SampleDeferred(7, (Mask(2, nothing),)), rows, pad
                )
            )
