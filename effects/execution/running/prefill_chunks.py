"""A step's prefill chunks, with what serves their attention besides the cache itself.

Chunks of large steps may be served by flash-attn, or have their contexts changed once per
layer before attention reads them: latents are expanded to keys and values, caches in 8
bits are dequantized. Numbers of these depend on the tokens before the chunks, so no CUDA
graph contains them.
"""

from torch import Tensor

from minfer.effects.execution.device.routes import Routes
from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.packing.inputs import PrefillWords
from minfer.effects.execution.packing.pack_plan import Forward
from minfer.effects.execution.running.batch_builder import chunks_of
from minfer.effects.execution.running.shortcuts import Shortcuts
from minfer.effects.models.architecture.batch import PrefillChunks
from minfer.effects.models.layout.shapes import context_blocks
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.flash import FlashWork
from minfer.kernels.packages import FLASH


def uses_history(
    shape: StepShape, forward: Forward, routes: Routes, block_size: int
) -> bool:
    """Returns whether latents are expanded for the step's chunks, or contexts
    dequantized.
    """
    if not shape.tokens:
        return False
    history, tokens, longest = forward.history, shape.tokens, shape.longest
    if routes.may_dequantize:
        blocks = context_blocks(history + tokens, shape.chunks, block_size)
        return routes.dequantizes(tokens, longest, blocks)
    return routes.expands(tokens, longest, history, forward.pairs)


def prefill_chunks(
    shape: StepShape,
    prefill: PrefillWords[Tensor],
    table: Tensor,
    block_size: int,
    routes: Routes,
    shortcuts: Shortcuts,
) -> PrefillChunks:
    """Returns the chunks of a step over block tables [tables, rows, max_blocks]."""
    rows, starts, counts, _ = prefill.chunks
    tokens, longest, history = shape.tokens, shape.longest, shape.history
    dequantized = None
    if history is not None and routes.may_dequantize:
        blocks = context_blocks(history + tokens, shape.chunks, block_size)
        dequantized = DequantizedWork.of(
            rows, starts, counts, table.shape[2], blocks, block_size
        )
    elif history is not None:
        work = ExpandedWork.of(rows, starts, counts, table, longest, history, block_size)
        flash = shortcuts.flash and routes.expands_by_flash(tokens, longest)
        if flash and shortcuts.can_use(FLASH):
            work = work._replace(by_flash=True)
        return chunks_of(shape, prefill, expanded=work)
    served = routes.by_flash(tokens, longest, dequantized=dequantized is not None)
    flashes: tuple[FlashWork | None, ...] = ()
    if shortcuts.flash and any(served) and shortcuts.can_use(FLASH):
        if dequantized is not None:  # all layers read one workspace, by one table
            rows = dequantized.own_rows
            table = dequantized.table[None].expand(len(table), -1, -1)
        flash_work = FlashWork.of(rows, starts, counts, table, longest)
        flashes = tuple(flash_work if by_flash else None for by_flash in served)
    return chunks_of(shape, prefill, flashes, dequantized=dequantized)
