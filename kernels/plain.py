"""Plain torch versions of linear, logprobs, norm, rows and drafts for the CPU, without
Triton.

They are the kernels' references, too. Few operations matter more than few bytes: the time
of a small model's step is that of its launches.
"""

import functools
import math
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels.leaves import Activation, GateActivation, Linear, Norm, WholeNorms
from minfer.kernels.row_state import RowTensors, StepInputs

SOFTPLUS_LINEAR_FROM: Final = 20.0  # above, softplus(x) is x
CLAMP: Final = 7.0  # of the clamped activation
STEEPNESS: Final = 1.702
# Rows of float32 for which `linear` computes weight @ x.T on the CPU: 1.3 to 2.8 times as
# fast as x @ weight.T (MKL on an AMD EPYC), which is as fast with one row and with 16. On
# a GPU, whose kernels leave some products to `linear`, it would be more launches.
FEW_ROWS: Final = range(2, 9)


def normalise(x: Tensor, norm: Norm, out: Tensor | None = None) -> Tensor:
    """Normalise over the last dimension of `x` (Zhang and Sennrich 2019); see
    `norm.normalise`.
    """
    if norm.centered:
        normalised = _layer_norm(x, norm)
        return normalised if out is None else out.copy_(normalised)
    is_float32, weight = x.dtype is torch.float32, norm.weight
    wide = x if is_float32 else x.float()
    # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(eps * n)) / sqrt(n): two launches fewer.
    floor, root = _constants(norm.eps, x.shape[-1])
    size: Tensor = torch.linalg.vector_norm(wide, 2, -1, True)
    scaled = wide.div(size.hypot_(floor).mul_(root))
    if weight.dtype is torch.float32:  # and so is the product
        scaled.mul_(weight)
        return scaled.to(x.dtype) if out is None else out.copy_(scaled)
    return torch.mul(scaled.to(x.dtype), weight, out=out)


def _layer_norm(x: Tensor, norm: Norm) -> Tensor:
    """Returns LayerNorm (Ba et al. 2016) over the last dimension of `x`: torch's computes
    in float32, but has one weight for all rows.
    """
    sizes = x.shape[-1:]
    if norm.weight.dim() == 1:
        return F.layer_norm(x, sizes, norm.weight, norm.bias, norm.eps)
    normalised = F.layer_norm(x.float(), sizes, eps=norm.eps).mul_(norm.weight)
    return normalised.to(x.dtype)


@functools.cache
def _constants(eps: float, size: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(math.sqrt(eps * size)), torch.tensor(1 / math.sqrt(size))


def square_sums(qkv: Tensor, norms: WholeNorms) -> Tensor:
    """Sums of squares of each token's queries and keys [tokens, 2]; see
    `heads_norm.square_sums`.
    """
    sums = [vectors.float().square().sum(-1) for vectors in _queries_keys(qkv, norms)]
    return torch.stack(sums, -1)


def norm_heads(
    qkv: Tensor, norms: WholeNorms, squares: Tensor | None = None, ranks: int = 1
) -> None:
    """Normalise the queries and the keys of all heads in place; see
    `heads_norm.norm_heads`.
    """
    squares = square_sums(qkv, norms) if squares is None else squares
    parts = zip(_queries_keys(qkv, norms), (norms.query, norms.key), strict=True)
    for index, (vectors, norm) in enumerate(parts):
        mean = squares[:, index, None] / (vectors.shape[1] * ranks)
        scaled = vectors.float() * (mean + norm.eps).rsqrt()
        if norm.weight.dtype is not torch.float32:
            scaled = scaled.to(vectors.dtype)
        vectors.copy_(scaled * norm.weight)


def _queries_keys(qkv: Tensor, norms: WholeNorms) -> tuple[Tensor, Tensor]:
    """Returns the queries [tokens, heads * head_dim] and the keys, views of `qkv`."""
    end = len(norms.query.weight)
    return qkv[:, :end], qkv[:, end : end + len(norms.key.weight)]


def linear(x: Tensor, matrix: Linear) -> Tensor:
    """x @ weight.T + bias: [tokens, in] -> [tokens, out]."""
    if not (_has_few_rows(x) and matrix.weight.is_contiguous()):
        return F.linear(x, matrix.weight, matrix.bias)
    product = torch.mm(matrix.weight, x.t()).t().contiguous()
    return product if matrix.bias is None else product.add_(matrix.bias)


def product_dtype(kind: torch.dtype) -> torch.dtype:
    """Returns the dtype in which the CPU multiplies many rows of a dtype fastest."""
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.float32 if kind is torch.bfloat16 and not fast else kind


def _has_few_rows(x: Tensor) -> bool:
    return len(x) in FEW_ROWS and x.dtype is torch.float32 and not x.is_cuda


def norm_linear(x: Tensor, norm: Norm | None, matrix: Linear) -> Tensor:
    """`linear` of normalise(x), or of rows as they are."""
    return linear(x if norm is None else normalise(x, norm), matrix)


def linear_add(residual: Tensor, x: Tensor, matrix: Linear) -> None:
    """residual [tokens, out] += x [tokens, in] @ weight.T + bias, within the product."""
    if _has_few_rows(x):
        residual.add_(linear(x, matrix))
        return
    residual.addmm_(x, matrix.weight.t())
    if matrix.bias is not None:
        residual.add_(matrix.bias)


def norm_gated(
    x: Tensor,
    norm: Norm | None,
    gate_up: Linear,
    activation: Activation = "silu",
    fused: bool = False,
) -> Tensor:
    """activation(gate) * up [tokens, intermediate], with [gate, up] = norm_linear(x)
    (Shazeer 2020). `fused` is for the GPU.
    """
    del fused
    return gated_mul(norm_linear(x, norm, gate_up), activation)


def gate_heads(x: Tensor, gates: Tensor, activation: GateActivation) -> None:
    """Multiply `x` [tokens, heads * dim] with the activation of `gates` in place:
    [tokens, heads], of a head each, or [tokens, heads * dim].
    """
    wide = gates.float()
    if activation == "softplus":
        factors = F.softplus(wide, threshold=SOFTPLUS_LINEAR_FROM)
    else:
        factors = wide.sigmoid()
    count = gates.shape[1]
    by_gate = x.view(len(x), count, x.shape[1] // count)
    by_gate.mul_(factors.to(x.dtype)[..., None])


def gated_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up [tokens, inter] of gates and ups [tokens, 2 * inter]; of an
    activation without a gate, activation(up) of ups [tokens, inter].
    """
    if activation == "ungated_gelu":
        return F.gelu(gate_up)
    if activation == "ungated_gelu_tanh":
        return F.gelu(gate_up, approximate="tanh")
    if activation == "ungated_relu2":
        return F.relu(gate_up).square_()
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return (gate * STEEPNESS).sigmoid_().mul_(gate).mul_(up + 1)


def scatter(arena: Tensor, pairs: Tensor) -> None:
    """arena[pairs[i]] = pairs[n + i] for the n = len(pairs) / 2 pairs; see rows.py."""
    places, values = pairs.chunk(2)
    arena[places.long()] = values


def gather(
    rows: Tensor,
    extra: Tensor | None,
    state: RowTensors,
    block_size: int,
    out: StepInputs,
) -> None:
    """Inputs of a step: of decode rows, then prefill tokens; see rows.py."""
    token = state.last.index_select(0, rows)
    position = state.next.index_select(0, rows)
    if extra is not None:
        rows, token = torch.cat((rows, extra[2])), torch.cat((token, extra[0]))
        position = torch.cat((position, extra[1]))
    out.tokens.copy_(token)
    out.positions.copy_(position)
    torch.add(position, 1, out=out.ahead)
    block_index = position // block_size
    page = state.table[:, rows, block_index]
    torch.add(position - block_index * block_size, page, alpha=block_size, out=out.slots)


def advance(
    rows: Tensor,
    positions: Tensor,
    drawn: Tensor,
    broken: Tensor,
    state: RowTensors,
    out: Tensor,
) -> None:
    """Store what rows sampled, but of the scratch row, which stays at position 0; see
    rows.py.
    """
    index = rows.long()
    state.last.index_copy_(0, index, drawn)
    state.next.index_copy_(0, index, positions)
    state.next[state.scratch] = 0
    torch.sub(drawn, broken, out=out[: rows.shape[0]])


def scale_logits(logits: Tensor, scale: float, cap: float | None = None) -> None:
    """See `scaled_logits.scale_logits`."""
    factor = scale if cap is None else scale / cap
    wide = logits.float().mul_(factor)  # float32 logits themselves
    logits.copy_(wide if cap is None else wide.tanh_().mul_(cap))


def store_logits(logits: Tensor, rows: Tensor, out: Tensor, scratch: int) -> None:
    """Store logits of rows that are not the scratch row; see masked_logits.py."""
    is_stored = rows != scratch
    out[rows[is_stored].long()] = logits[is_stored]


def mask_logits(stored_logits: Tensor, rows: Tensor, masks: Tensor) -> Tensor:
    """Logits of rows, without the tokens that are not allowed; see masked_logits.py."""
    places = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> places & 1).flatten(1)[:, : stored_logits.shape[1]]
    return stored_logits.index_select(0, rows.long()).masked_fill(bits == 0, -torch.inf)


def logprobs(
    logits: Tensor, tokens: Tensor, rows: Tensor, requested: Tensor, out: Tensor
) -> None:
    """Log-probabilities of `tokens`, and of the likeliest; see logprobs.py."""
    counts = requested[rows.long()]
    listed = counts.nonzero()[:, 0]
    if not len(listed):
        return
    x, sampled, counts = (
        logits[listed].float(),
        tokens[listed, None].long(),
        counts[listed, None],
    )
    bits = (x + 0.0).view(torch.int32)  # -0 is 0
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (order.long() << 32) - torch.arange(x.shape[1], device=x.device)
    ids = keys.topk(int(counts.max()) - 1).indices
    rank = (keys >= keys.gather(1, sampled)).sum(1, keepdim=True)
    log_probs = x.log_softmax(1).gather(1, torch.cat((sampled, ids), 1))
    results = torch.stack(
        (torch.cat((rank, ids), 1).int(), log_probs.view(torch.int32)), 1
    )
    width = log_probs.shape[1]
    is_requested = torch.arange(width, device=x.device) < counts
    out[listed, :, :width] = torch.where(
        is_requested[:, None], results, out[listed, :, :width]
    )


def write_draft_inputs(
    rows: Tensor,
    counts: Tensor,
    drafts: Tensor,
    proposed: Tensor | None,
    state: RowTensors,
    out: Tensor,
) -> None:
    """Drafts as inputs; see verify_drafts.py."""
    places = torch.arange(len(drafts), dtype=torch.int32, device=drafts.device)[:, None]
    has_draft = places < counts
    tokens = drafts if proposed is None else torch.where(drafts < 0, proposed, drafts)
    positions = state.next.index_select(0, rows) + 1 + places
    owners = torch.where(has_draft, rows, state.scratch)
    for line, values in zip(out, (tokens, positions), strict=False):
        line.copy_(torch.where(has_draft, values, 0).flatten())
    out[2].copy_(owners.flatten())


def accept_drafts(
    before: Tensor,
    drafts: Tensor,
    owners: Tensor,
    state: RowTensors,
    place: int,
    next_rows: Tensor,
    positions: Tensor,
    accepted: Tensor,
) -> None:
    """Write which rows accept draft number `place`; see verify_drafts.py."""
    accepts = (owners == before) & (owners != state.scratch)
    accepts &= state.last.index_select(0, owners) == drafts
    next_rows.copy_(torch.where(accepts, owners, state.scratch))
    last_positions = state.next.index_select(0, owners)
    positions.copy_(torch.where(accepts, last_positions, 0) + 1)
    old_accepted = accepted if place else torch.zeros_like(accepted)
    accepted.copy_(torch.where(accepts, place + 1, old_accepted))
