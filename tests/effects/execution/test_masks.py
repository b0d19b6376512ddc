"""Masks lie where the draws read them, before these run."""

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.pack_plan import Draw
from minfer.effects.execution.running.deferred_sampling import (
    DeferredDraws,
    MaskError,
    mask_words,
)
from minfer.effects.execution.running.device_masks import HOST_BUFFERS, DeviceMasks

VOCAB = 40  # a word, and part of another
DRAWS = 6
CPU = torch.device("cpu")


def late(*masks: bytes) -> DeferredDraws:
    """Draws with these masks."""
    count = len(masks)
    return DeferredDraws(
        shape=StepShape(decode_rows=0, draws=count, deferred_draws=True),
        words=np.zeros(2 * count, np.int32),
        draw=Draw(list(range(count)), [None] * count),
        masks=list(masks),
        reassigned=[],
    )


def only(*tokens: int) -> bytes:
    return sum(1 << token for token in tokens).to_bytes(VOCAB // 8, "little")


def tokens(lines: Tensor) -> list[set[int]]:
    """Those that each line allows."""
    bits = np.unpackbits(lines.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(line).tolist()) for line in bits]


def buffers(masks: DeviceMasks) -> list[int]:
    """Where the host's lie, the one that was used last first."""
    return [buffer.lines.data_ptr() for buffer in masks._host]


def test_at_first_every_token_may_be_drawn() -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    assert masks.lines.shape == (DRAWS, mask_words(VOCAB))
    assert masks.lines.dtype == torch.int32
    assert (masks.lines == -1).all()


def test_masks_lie_in_the_order_of_draws_and_others_stay() -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    masks.send(late(only(1), only(2, 39), b"", only(31, 32)))
    masks.read()
    everything = set(range(VOCAB))
    assert tokens(masks.lines[:4]) == [{1}, {2, 39}, everything, {31, 32}]
    assert (masks.lines[4:] == -1).all()
    masks.send(late(only(5)))
    assert tokens(masks.lines[:4]) == [{5}, {2, 39}, everything, {31, 32}]


def test_where_they_lie_is_one_place_as_graphs_read_there() -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    address = masks.lines.data_ptr()
    for token in range(HOST_BUFFERS + 2):
        masks.send(late(only(token)))
        assert masks.lines.data_ptr() == address
        assert tokens(masks.lines[:1]) == [{token}]


def test_buffers_take_turns() -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    used = []
    for token in range(2 * HOST_BUFFERS):
        masks.send(late(only(token)))
        used.append(buffers(masks)[0])
    assert len({*used}) == HOST_BUFFERS
    assert used[:HOST_BUFFERS] == used[HOST_BUFFERS:]
    # What was handed over stays, until the turn comes again.
    last = [buffer.lines for buffer in masks._host]
    assert {*tokens(torch.stack([buffer[0] for buffer in last]))[0]} == {
        2 * HOST_BUFFERS - 1
    }
    kept_tokens = {token for buffer in last for token in tokens(buffer[:1])[0]}
    assert kept_tokens == set(range(HOST_BUFFERS, 2 * HOST_BUFFERS))


def written(step: int, *lines: int) -> DeferredDraws:
    """Draws whose masks lie in these lines of what was lent for a step."""
    return evolve(late(*(b"" for _ in lines)), masks=[], step=step, lines=list(lines))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2), (2,)])
def test_masks_in_lent_memory_are_sent_from_there(order: tuple[int, ...]) -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    lines = masks.lend(5)
    assert lines.shape == (DRAWS, mask_words(VOCAB))
    lines[:3, :] = 0
    lines[:3, 0] = 1 << np.arange(3)
    masks.send(written(5, *order))
    assert tokens(masks.lines[: len(order)]) == [{line} for line in order]
    with pytest.raises(AssertionError, match="no masks of step 5"):
        masks.send(written(5, *order))


def test_lent_memory_is_not_reused_before_it_was_sent() -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    for step in range(HOST_BUFFERS + 2):
        masks.lend(step)[0] = step, 0
    for token in range(2 * HOST_BUFFERS):
        masks.send(late(only(token)))
    for step in range(HOST_BUFFERS + 2):
        masks.send(written(step, 0))
        assert masks.lines[0].tolist() == [step, 0]
    count = len(masks._host)
    for step in range(50):
        masks.lend(step)
        masks.lend(100)
        masks.forget(step)  # as all of its rows have gone
        masks.forget()  # as the step failed
    assert len(masks._host) == count


@pytest.mark.parametrize("nothing", [b"\0", bytes(5), bytes(5) + b"\xff"])
def test_a_mask_that_allows_nothing_is_refused_and_changes_nothing(
    nothing: bytes,
) -> None:
    masks = DeviceMasks(DRAWS, VOCAB, CPU)
    masks.send(late(only(1), only(2)))
    with pytest.raises(MaskError, match="allows no token"):
        masks.send(late(only(3), nothing))
    assert tokens(masks.lines[:2]) == [{1}, {2}]
    masks.send(late(only(3)))
    assert tokens(masks.lines[:2]) == [{3}, {2}]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="is about a GPU's streams")
def test_the_first_masks_of_a_gpu_come_behind_what_runs_there() -> None:
    gpu = torch.device("cuda")
    masks = DeviceMasks(DRAWS, VOCAB, gpu)
    torch.cuda.current_stream(gpu).synchronize()
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch's: cycles
    masks.send(late(only(1), only(2)))
    torch.cuda.synchronize(gpu)
    assert tokens(masks.lines[:2]) == [{1}, {2}]
    assert (masks.lines[2:] == -1).all()
    masks.read()
    for token in range(2 * HOST_BUFFERS):
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # torch's
        masks.send(late(only(token)))
        read = masks.lines.clone()
        masks.read()
        assert tokens(read[:1]) == [{token}]
