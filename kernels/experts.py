"""Mixtures of experts: the sum of the feed-forwards that a router chose for each token.

Theory. A pair is a token and one of its experts. The experts that are hit are read once,
at best: 9.44 MB each for Qwen3-30B-A3B (hidden 2,048, inter 768), 8 at one token, nearly
all 128 at 64: 17.7 us and 284 us a layer at 4.26 TB/s. Below some 200 pairs an expert
memory is the limit, and routing, gates and sums must not add launches or traffic to it.

Few tokens: no sort. A program of `few_gate_up` has a pair and a few columns, one of
`few_down` a token and a few columns, for which it goes through the token's experts in
order and adds to the residual: two launches. Programs are single warps which have all
loads of a pass in flight: 25 KB on each of 132 processors hide a latency of 0.8 us.
Programs of the same columns are next to each other, so where two tokens chose the same
expert, its weights come from the cache.

Many tokens: `group_pairs` lists each expert's pairs, and cuts the lists into tiles of
`rows`. There are at most min(pairs, experts) + pairs // rows tiles, which is the grid of
the two products, whatever was chosen: programs beyond the last tile end after one load.
No host waits for a count, so a CUDA graph holds it all. `grouped` multiplies a tile's
rows, found by their pairs, with columns of its expert; gates are applied as the sums are
stored. `combine` adds a token's parts to the residual, in the order of its pairs.
Four launches. Padding, of id -1, is in no tile.

Between the two products no bandwidth is lost: which weights the second needs is known
before the first runs. So the first lets it start only after the routing is complete
(pdl.follow_first), and it loads weights, to registers or to the cache, while the last
programs of the first still run; for few tokens what was chosen as well, so that one
latency remains, of what the gates gave.

A row's bits. A list's order depends on which program counted first. It decides in which
row of which tile a pair is, and no more: an element of a product is the sum, over the
depth in the order of the tile's constants, of that pair's row and one line of weights;
other rows of the tile are not in it; it is stored by its pair; and sums over a token's
experts are in order of k. So within a path and a tune (of shapes alone,
experts_tunes.py), a token's bits depend on that token, and on how many there are.

Quantized experts. Tiles are decoded as they are multiplied (leaf_tiles.py), so that an
expert's bytes are read once, as they are stored. Activations stay as they are, but for
FP8 in blocks with many tokens: there they are rounded, as that scheme says, since
decoding takes longer than the products. Inputs are rounded once, and what the gates
multiplied by the program that computes it, whose columns are one group.

Weights of inputs (Llama 4) multiply the sums of gates and ups, before the activation:
those of a weighed row are the row's, weighed.

Roundings. plain_experts.py rounds gates and ups, silu, and an expert's outputs to the
activations' dtype. Here all is float32 up to the gated product, which is rounded; outputs
of experts are rounded where there are many tokens, not where there are few. The
residual is rounded once, as there.
"""

from typing import Final

import torch
import triton
from attrs import frozen
from torch import Tensor

from minfer.kernels import on_triton, plain_experts
from minfer.kernels.eight_bits import LARGEST
from minfer.kernels.experts_kernels import (
    combine,
    few_down,
    few_gate_up,
    group_pairs,
    grouped,
)
from minfer.kernels.experts_tunes import (
    ExpertsTune,
    FewTokensTune,
    GroupedTune,
    ManyTokensTune,
    tune_of,
)
from minfer.kernels.leaves import UNGATED, Activation, ChosenExperts, Experts, Linear
from minfer.kernels.lora import ExpertAdapters
from minfer.kernels.pdl import arrivals, early
from minfer.kernels.plain_lora import AdapterTokens
from minfer.kernels.quantized_kernels import round_groups

CHUNK: Final = 1024  # pairs of a program that groups them
GROUP_WARPS: Final = 4
COMBINE_TILE: Final = 1024  # elements of a program that combines: 8 a thread
COMBINE_WARPS: Final = 4


def add_experts(
    residual: Tensor,
    x: Tensor,
    experts: Experts,
    choice: ChosenExperts,
    tune: ExpertsTune | None = None,
    adapters: AdapterTokens | None = None,
) -> None:
    """Add to `residual` the weighted sum of each token's experts of `x`, as
    `plain_experts.add_experts`; both [tokens, hidden], rows contiguous. A token's ids
    are distinct, or -1. Call it before a CUDA graph captures it. tune: constants instead
    of the tables' (experts_tunes.py). adapters: of the tokens.
    """
    tokens, top_k = choice.ids.shape
    if not tokens or not _fits(residual, x, experts):
        plain_experts.add_experts(residual, x, experts, choice, adapters)
        return
    wide, of_pairs = x.element_size() > 2, None
    if adapters is not None:  # what they multiply is not rounded
        of_pairs = ExpertAdapters(adapters, choice)
    tune = tune or tune_of(
        tokens, top_k, experts, is_float32=wide, rounds=adapters is None
    )
    if isinstance(tune, FewTokensTune):
        _launch_few_tokens(residual, x, experts, choice, tune, of_pairs)
    else:
        _launch_grouped(residual, x, experts, choice, tune, of_pairs)


def experts_hit(choice: ChosenExperts) -> Tensor:
    """How many experts have a token: an integer on the device, for measurements."""
    ids = choice.ids.flatten().sort().values
    first = ids >= 0
    first[1:] &= ids[1:] != ids[:-1]
    return first.sum()


def max_tile_count(pairs: int, experts: int, rows: int) -> int:
    """The most tiles of `rows` rows for any choice: an expert has at most one that is
    not full.
    """
    return min(pairs, experts) + pairs // rows


def _fits(residual: Tensor, x: Tensor, experts: Experts) -> bool:
    """Whether the kernels take such tensors."""
    rows_contiguous = residual.stride(1) == x.stride(1) == 1
    matrices = (experts.gate_up, experts.down)
    are_contiguous = all(matrix.weight.is_contiguous() for matrix in matrices)
    return rows_contiguous and are_contiguous and on_triton(x)


def _hidden_and_inner(experts: Experts) -> tuple[int, int]:
    """Returns the hidden and the inner size."""
    return experts.down.weight.shape[1], experts.down.inputs


def _weights(
    experts: Experts, choice: ChosenExperts
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the weights of inputs and those of outputs, one of which is None."""
    if experts.weighs_inputs:
        return choice.weights, None
    return None, choice.weights


def _scale_group(matrix: Linear, depth: int) -> int:
    """How many inputs share a scale, where sums over several matrices are not scaled at
    their end. A scale of all inputs is that of every pass.
    """
    if matrix.scales is None:
        return 0
    return matrix.scheme.group or max(matrix.inputs, depth)


def _launch_few_tokens(
    residual: Tensor,
    x: Tensor,
    experts: Experts,
    choice: ChosenExperts,
    tune: FewTokensTune,
    adapters: ExpertAdapters | None,
) -> None:
    tokens, top_k = choice.ids.shape
    hidden, inter = _hidden_and_inner(experts)
    inner = x.new_empty(tokens * top_k, inter)
    gate_up_tune, down_tune = tune
    of_inputs, of_outputs = _weights(experts, choice)
    few_gate_up[tokens * top_k, triton.cdiv(inter, gate_up_tune.columns)](
        x=x,
        x_stride=x.stride(0),
        weight=experts.gate_up.weight,
        scales=experts.gate_up.scales,
        extras=experts.gate_up.extras,
        bias=experts.gate_up.bias,
        out=inner,
        ids=choice.ids,
        weights=of_inputs,
        added=_added(adapters, x, experts.gate_up, tokens * top_k),
        top_k=top_k,
        columns=inter,
        size=hidden,
        scaled=_scale_group(experts.gate_up, gate_up_tune.depth),
        activation=experts.activation,
        gated=experts.activation not in UNGATED,
        cols=gate_up_tune.columns,
        depth=gate_up_tune.depth,
        stages=gate_up_tune.stages,
        num_warps=gate_up_tune.warps,
        launch_pdl=early(x),
    )
    few_down[tokens, triton.cdiv(hidden, down_tune.columns)](
        x=inner,
        weight=experts.down.weight,
        scales=experts.down.scales,
        extras=experts.down.extras,
        bias=experts.down.bias,
        residual=residual,
        residual_stride=residual.stride(0),
        ids=choice.ids,
        weights=of_outputs,
        top_k=top_k,
        columns=hidden,
        size=inter,
        scaled=_scale_group(experts.down, down_tune.depth),
        cols=down_tune.columns,
        depth=down_tune.depth,
        ahead=down_tune.ahead,
        num_warps=down_tune.warps,
        launch_pdl=early(x),
    )
    pair_outputs = _added(adapters, inner, experts.down, tokens * top_k)
    if pair_outputs is not None:
        _combine(residual, pair_outputs, choice.ids, of_outputs)


def _launch_grouped(
    residual: Tensor,
    x: Tensor,
    experts: Experts,
    choice: ChosenExperts,
    tune: ManyTokensTune,
    adapters: ExpertAdapters | None,
) -> None:
    tokens, top_k = choice.ids.shape
    hidden, inter = _hidden_and_inner(experts)
    tiles = _Tiles(choice, len(experts.down.weight), tune.rows)
    of_inputs, of_outputs = _weights(experts, choice)
    rows, inner = Rows(x), Rows(x.new_empty(tokens * top_k, inter))
    if tune.rounded:
        matrix = experts.gate_up
        rows = Rows(*round_groups(x, matrix.weight.dtype, matrix.scheme.group))
        inner = Rows(
            rows.numbers.new_empty(tokens * top_k, inter),
            x.new_empty(
                tokens * top_k, inter // tune.gate_up.columns, dtype=torch.float32
            ),
        )
    tiles.product(
        rows,
        top_k,
        experts.gate_up,
        experts.activation,
        inner,
        tune.gate_up,
        of_inputs,
        _added(adapters, x, experts.gate_up, tokens * top_k),
    )
    pair_outputs = x.new_empty(tokens * top_k, hidden)
    down_outputs = Rows(pair_outputs)
    tiles.product(inner, 1, experts.down, None, down_outputs, tune.down, None)
    if adapters is not None and experts.down.adapters is not None:
        adapters.add(pair_outputs, inner.numbers, experts.down.adapters)
    _combine(residual, pair_outputs, choice.ids, of_outputs)


def _added(
    adapters: ExpertAdapters | None, x: Tensor, matrix: Linear, pairs: int
) -> Tensor | None:
    """Returns what adapters add to the products of pairs [pairs, outputs]; None:
    nothing.
    """
    if adapters is None or matrix.adapters is None:
        return None
    added = x.new_zeros(pairs, sum(matrix.adapters.parts))
    adapters.add(added, x, matrix.adapters)
    return added


def _combine(
    residual: Tensor, pair_outputs: Tensor, ids: Tensor, weights: Tensor | None
) -> None:
    """Add the weighed sum of each token's pairs [pairs, hidden] to the residual."""
    (tokens, top_k), hidden = ids.shape, pair_outputs.shape[1]
    combine[tokens, triton.cdiv(hidden, COMBINE_TILE)](
        pair_outputs=pair_outputs,
        residual=residual,
        residual_stride=residual.stride(0),
        ids=ids,
        weights=weights,
        size=hidden,
        top_k=top_k,
        tile=COMBINE_TILE,
        num_warps=COMBINE_WARPS,
        launch_pdl=early(residual),
    )


@frozen(eq=False)
class Rows:
    """Activations as they are, or rounded to 8 bits."""

    numbers: Tensor  # [rows, size]
    scales: Tensor | None = None  # [rows, groups] float32


class _Tiles:
    """The pairs of each expert, in tiles of rows."""

    def __init__(self, choice: ChosenExperts, experts: int, rows: int) -> None:
        self.tokens, top_k = choice.ids.shape
        self.rows = rows
        self.early = early(choice.ids)
        pairs = self.tokens * top_k
        self.max_tiles = max_tile_count(pairs, experts, rows)
        self.lists = choice.ids.new_empty(experts, self.tokens)
        self.tiles = choice.ids.new_empty(1 + 3 * self.max_tiles)
        group_pairs[triton.cdiv(pairs, CHUNK),](
            ids=choice.ids,
            lists=self.lists,
            tiles=self.tiles,
            counts=arrivals(choice.ids.device, 1 + experts),
            pairs=pairs,
            tokens=self.tokens,
            max_tiles=self.max_tiles,
            experts=experts,
            rows=rows,
            chunk=CHUNK,
            lanes=triton.next_power_of_2(experts),
            num_warps=GROUP_WARPS,
            launch_pdl=self.early,
        )

    def product(
        self,
        x: Rows,
        top_k: int,
        matrix: Linear,
        activation: Activation | None,
        out: Rows,
        tune: GroupedTune,
        weights: Tensor | None,
        added: Tensor | None = None,
    ) -> None:
        """Multiply row pair // `top_k` of x with its expert's matrix, and, if there are
        weights, with the pair's, to `out` [pairs, columns]. `added`: what adapters add.
        """
        columns = out.numbers.shape[1]
        grouped[self.max_tiles * triton.cdiv(columns, tune.columns),](
            x=x.numbers,
            x_stride=x.numbers.stride(0),
            x_scales=x.scales,
            weight=matrix.weight,
            scales=matrix.scales,
            extras=matrix.extras,
            bias=matrix.bias,
            out=out.numbers,
            out_scales=out.scales,
            weights=weights,
            added=added,
            lists=self.lists,
            tiles=self.tiles,
            tokens=self.tokens,
            max_tiles=self.max_tiles,
            top_k=top_k,
            columns=columns,
            size=x.numbers.shape[1],
            scaled=matrix.scheme.group,
            activation=activation,
            gated=activation is not None and activation not in UNGATED,
            rows=self.rows,
            cols=tune.columns,
            depth=tune.depth,
            group=tune.group,
            swapped=tune.swapped,
            stages=tune.stages,
            largest=LARGEST.get(out.numbers.dtype, 0.0),
            num_warps=tune.warps,
            launch_pdl=self.early,
        )
