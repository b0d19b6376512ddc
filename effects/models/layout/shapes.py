"""Arithmetic of shapes: what a model and a step of it need, from its spec and the
engine's sizes alone.

The bytes of weights and of a token's keys and values, the padding of a step so that a
CUDA graph can serve it, the steps that are captured at all, and the bytes of a forward at
its widest place. Functions of their arguments, without torch.
"""

from typing import Final

from minfer.effects.models.architecture.draft_head import HeadSpec
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.mla import MLA
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.dtypes import dtype_bytes, kv_dtype_bytes
from minfer.kernels.leaves import MAX_DEQUANTIZED_NUMBERS
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, REJECTION
from minfer.sampling.params import MAX_ADJUSTMENTS

# A layer's weights, with its share of the embeddings, times tokens: up to this, its
# launches, eight of 80 us, take about as long as its products at 690 TFLOP/s (H200,
# 2026-11-22).
MAX_CAPTURED_WORK: Final = 2.8e11
# Of masks on the CPU: those that are made at once, and of a decode row at most.
MAX_MASK_NUMBERS: Final = 1 << 22
MAX_PADDED_NUMBERS: Final = 4096
# Of rows' states of a layer, in float32 on the CPU: as they are gathered, with what is
# added to them, and as they are scattered.
STATE_COPIES: Final = 3
# Bytes for each token of the vocabulary in rejection sampling: of as many rows as
# kernels/reject.py works on at once.
REJECTION_BYTES_PER_ID: Final = 16 * 128


def parameter_count(spec: ModelSpec) -> int:
    """Returns the parameters held in memory (a tied embedding counts once)."""
    if spec.parameters:
        return spec.parameters
    rows = spec.embed_rows + (0 if spec.tie_word_embeddings else spec.head_rows)
    embeddings = rows * spec.hidden_size + spec.head_rows * spec.head_bias
    norm = spec.hidden_size * (1 + spec.norms.bias)
    if spec.input_table is not None:
        embeddings += spec.input_table.parameters
    if spec.altup is not None:
        embeddings += spec.altup.projection_parameters
    return sum(layer.parameters for layer in spec.layers) + embeddings + norm


def weight_bytes(spec: ModelSpec, *, cuda: bool) -> int:
    """Returns the bytes of all weights, as they are stored on a GPU or on the CPU."""
    element = dtype_bytes(spec.dtype)
    stored = elements = 0
    for sizes in spec.matrices:
        scheme = spec.scheme_of(sizes)
        stored += sizes.matrix_bytes(scheme, spec.dtype, cuda=cuda)
        elements += sizes.matrix_elements
    num_float32 = sum(layer.float32_elements for layer in spec.layers)
    num_float32 += spec.hidden_size * spec.norms.wide
    if spec.input_table is not None:
        num_float32 += spec.input_table.width * spec.norms.wide
    num_others = parameter_count(spec) - elements - num_float32
    num_units = sum(attention.unit_elements for attention in spec.attentions)
    return stored + num_others * element + (num_float32 + num_units) * 4


ID_BYTES: Final = 8  # of a token of a reduced vocabulary: int64


def head_bytes(head: HeadSpec, dtype: str, *, cuda: bool) -> int:
    """Returns the bytes of a draft head's weights, those that it shares with its target
    left out.
    """
    stored = elements = 0
    for sizes in head.matrices:
        stored += sizes.matrix_bytes(head.scheme_of(sizes), dtype, cuda=cuda)
        elements += sizes.matrix_elements
    num_others = head.parameters - elements - head.float32_elements
    ids = (head.draft_vocab_size or 0) * bool(head.names.target_ids) * ID_BYTES
    return stored + num_others * dtype_bytes(dtype) + head.float32_elements * 4 + ids


def head_activation_bytes(head: HeadSpec, dtype: str, sizes: EngineConfig) -> int:
    """Returns the bytes that a draft head keeps of a step beside its layer's: the
    target's noted streams, hidden states before and behind, embeddings, pairs of these
    and products of keys; and logits of the rows that have drafts.
    """
    widths = len(head.hidden_layers) * head.target_hidden_size + 6 * head.hidden_size
    of_tokens = sizes.max_num_batched_tokens * widths
    of_rows = sizes.max_num_seqs * (head.vocab_size + head.hidden_size)
    return (of_tokens + of_rows) * dtype_bytes(dtype)


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Returns the bytes of one token in the cache, over all layers."""
    return sum(kv_format.token_bytes for kv_format in spec.kv_formats)


def layer_kv_bytes_per_token(spec: ModelSpec) -> int:
    """Returns the bytes of one token in the place of one layer in the cache, at most;
    several smaller layers may share one.
    """
    return max(
        kv_format.layer_bytes * group.attention.layers_a_slot
        for group, kv_format in zip(spec.groups, spec.kv_formats, strict=True)
    )


def padded_tokens(count: int) -> int:
    """Returns the prefill tokens of the CUDA graph that serves `count` tokens: at most
    1.5 times as many above 128.
    """
    return -(-count // _padding_step(count)) * _padding_step(count)


def _padding_step(count: int) -> int:
    return max(64, (1 << (count - 1).bit_length()) // 4)


def next_power_of_two(count: int) -> int:
    """Returns the smallest power of two that is not below `count`, which is at least
    1.
    """
    return 1 << (count - 1).bit_length()


def padded_drafts(count: int) -> int:
    """Returns the drafts of a row in the CUDA graph that serves `count` drafts: 1, 2, 3,
    4, 6, 8, 12...
    """
    power = next_power_of_two(count)
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def max_step_drafts(sizes: EngineConfig) -> int:
    """Returns the drafts of the largest step of an engine, padding included.

    All rows have as many lines as the row with the most drafts. Together these are not
    more than the budget: no plan has more (`minfer.planning.plan_drafts`).
    """
    spec_config = sizes.speculation
    if spec_config is None:
        return 0
    rows = next_power_of_two(
        min(spec_config.rows or sizes.max_num_seqs, sizes.max_num_seqs)
    )
    budget = padded_tokens(sizes.max_num_batched_tokens)
    return max(rows, min(rows * padded_drafts(spec_config.drafts), budget))


def captured_tokens(spec: ModelSpec, budget: int) -> int:
    """Returns the prefill tokens of the largest step that is captured as a CUDA graph: as
    many for all stages, which have to pad steps alike.
    """
    spec = spec.all_stages or spec
    active = sum(layer.active_parameters for layer in spec.layers)
    embeddings = parameter_count(spec) - sum(layer.parameters for layer in spec.layers)
    max_tokens = int(MAX_CAPTURED_WORK / ((active + embeddings) // len(spec.layers)))
    return min(
        padded_tokens(budget),
        max_tokens // _padding_step(max_tokens) * _padding_step(max_tokens),
    )


def activation_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of a forward and the sampler besides weights and cache, at
    most.
    """
    element, kv_element = dtype_bytes(spec.dtype), kv_dtype_bytes(spec.kv_dtype)
    attention = max(
        group.attention.activation_bytes(element, kv_element) for group in spec.groups
    )
    feed_forward = _widest_feed_forward(spec) * element
    rows = (2 + _branch_rows(spec) + _stream_rows(spec)) * spec.hidden_size
    mixing = _mixing_bytes(spec, attention, element)
    token = rows * element + max(mixing, feed_forward)
    token += _layer_input_elements(spec) * element
    # Logits, their float32 copy, noise, a sorted or masked copy, a shaped one.
    row = spec.vocab_size * (element + 4 * 4)
    rope = 2 * _rope_bytes(spec, sizes)
    drafts = max_step_drafts(sizes)
    tokens = sizes.max_num_batched_tokens + drafts
    rows = sizes.max_num_seqs + drafts
    step = tokens * token + mask_bytes(spec, sizes, tokens) + rows * row + rope
    others = dequantized_bytes(spec) + capped_score_bytes(spec, sizes)
    others += sizes.max_num_seqs * _state_copies_bytes(spec)
    others += pending_state_bytes(spec, sizes, sizes.max_num_seqs + drafts)
    return step + rejection_bytes(spec, sizes) + others


def _mixing_bytes(spec: ModelSpec, attention: int, element: int) -> int:
    """Returns a token's bytes at the widest place of attention, for which it takes
    `attention`, and of recurrent sublayers, which may be beside one.
    """
    recurrent = [layer for layer in spec.layers if layer.recurrent is not None]
    widest = max(
        (
            layer.recurrent.activation_bytes(element)
            for layer in recurrent
            if layer.recurrent is not None
        ),
        default=0,
    )
    if any(layer.attention is not None for layer in recurrent):
        return attention + widest
    return max(attention, widest)


def _state_copies_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of a row's state of one layer as the CPU works on it."""
    elements = (
        sum(part.units * part.unit_elements for part in layer.state_parts)
        for layer in spec.layers
    )
    return STATE_COPIES * 4 * max(elements)


def dequantized_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of what plain torch dequantizes at once: in float64 at most, and
    a copy in float32.
    """
    if spec.quantization is None:
        return 0
    counts = (sum(matrix.outputs) * matrix.inputs for matrix in spec.matrices)
    return min(max(counts, default=0), MAX_DEQUANTIZED_NUMBERS) * (8 + 4)


def capped_score_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of capped scores on the CPU: those of as many queries as are
    computed at once, with the products that they are made of, and their softmax.
    """
    attentions = (group.attention for group in spec.groups)
    heads = (
        attention.heads
        for attention in attentions
        if isinstance(attention, GQA) and attention.score_cap is not None
    )
    if not (most := max(heads, default=0)):
        return 0
    return (4 + 4 + 4) * max(MAX_MASK_NUMBERS, most * sizes.max_model_len)


def mask_bytes(spec: ModelSpec, sizes: EngineConfig, tokens: int) -> int:
    """Returns the bytes of the masks of `tokens` tokens: each against a full context and
    each sliding window, but of no more numbers than are made at once on the CPU, and
    those of padded decode rows.

    Each is float32, and the boolean that it is made from; a copy has the dtype of scores.
    """
    beside, size = sizes.max_num_batched_tokens + sizes.block_size, sizes.block_size
    kinds = {(g.attention.window, g.attention.sink_tokens) for g in spec.groups}
    keys = (
        window + -(-sinks // size) * size + beside if window else sizes.max_model_len
        for window, sinks in kinds
    )
    chunks = tokens * sum(min(count, sizes.max_model_len) for count in keys)
    padded = (
        len(kinds) * sizes.max_num_seqs * min(sizes.max_model_len, MAX_PADDED_NUMBERS)
    )
    return (4 + 1 + 4) * (min(chunks, MAX_MASK_NUMBERS) + padded)


def cuda_activation_bytes(spec: ModelSpec, sizes: EngineConfig, tokens: int) -> int:
    """Returns the bytes of a forward and the sampler on a GPU, for `tokens` tokens
    besides drafts.
    """
    element = dtype_bytes(spec.dtype)
    drafts = max_step_drafts(sizes)
    tokens += drafts
    rows = max(64, sizes.max_num_seqs * 5 // 4) + 32 + drafts  # padding included
    attentions = [group.attention for group in spec.groups]
    max_attention = max(attention.cuda_activation_elements for attention in attentions)
    mixing = _mixing_bytes(spec, max_attention * element, element)
    widest = max(mixing, _widest_feed_forward(spec) * element)
    rows_of_token = 3 + _branch_rows(spec) + _stream_rows(spec)
    row_elements = rows_of_token * spec.hidden_size + _layer_input_elements(spec)
    token = element * row_elements + widest
    # And the ids that top-k and top-p keep, and shaped ones in float32.
    logits = spec.vocab_size * (element + 4 + 4)
    tables = 4 * sizes.max_num_seqs * (sizes.max_model_len // sizes.block_size + 1)
    rope = _rope_bytes(spec, sizes)
    partials = max(
        attention.cuda_partial_bytes(rows, sizes.max_model_len)
        for attention in attentions
    )
    step = tokens * token + rows * logits + 4 * tables + rope + partials
    step += pending_state_bytes(spec, sizes, rows)
    return step + rejection_bytes(spec, sizes)


def pending_state_bytes(spec: ModelSpec, sizes: EngineConfig, inputs: int) -> int:
    """Returns the bytes that recurrent layers keep of a step with drafts until these are
    accepted, for `inputs` tokens of decode rows and drafts.
    """
    if sizes.speculation is None:
        return 0
    elements = (
        layer.recurrent.pending_elements
        for layer in spec.layers
        if layer.recurrent is not None
    )
    return inputs * sum(elements) * dtype_bytes(spec.dtype)


def expansion_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns a GPU's bytes for latents that are expanded, in steps that are too large
    for CUDA graphs.
    """
    tokens = sizes.max_num_batched_tokens
    if captured_tokens(spec, tokens) >= tokens:
        return 0
    element = dtype_bytes(spec.dtype)
    attentions = (group.attention for group in spec.groups)
    pieces = [
        attention.pieces(tokens, element)
        for attention in attentions
        if isinstance(attention, MLA)
    ]
    return max((piece.bytes for piece in pieces), default=0)


def dequantized_blocks(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the blocks of contexts in 8 bits that a GPU dequantizes at once, at most:
    those of a context of full length, and of a whole step beside it. 0: the cache is not
    of keys and values in 8 bits.
    """
    latents = any(kv_format.layout == "latents" for kv_format in spec.kv_formats)
    if latents or kv_dtype_bytes(spec.kv_dtype) > 1:
        return 0
    tokens = sizes.max_model_len + sizes.max_num_batched_tokens
    return context_blocks(tokens, sizes.max_num_seqs, sizes.block_size)


def dequantized_context_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of these blocks of one layer, in the model's dtype, if there are
    steps that are too large for CUDA graphs.
    """
    budget = sizes.max_num_batched_tokens
    if captured_tokens(spec, budget) >= budget:
        return 0
    tokens = dequantized_blocks(spec, sizes) * sizes.block_size
    num_elements = max(group.attention.kv_elements for group in spec.groups)
    return tokens * num_elements * dtype_bytes(spec.dtype)


def context_blocks(tokens: int, chunks: int, block_size: int) -> int:
    """Returns the largest number of blocks that the contexts of `chunks` chunks take,
    with `tokens` tokens in all.
    """
    return tokens // block_size + chunks


def rejection_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of rejection sampling, if it is used: the logits that a draft
    model sampled from, in float32 at most, and distributions.
    """
    spec_config = sizes.speculation
    if spec_config is None or spec_config.rule != REJECTION:
        return 0
    draft_logits = 4 * max_step_drafts(sizes) if spec_config.drafter == DEVICE else 0
    return spec.vocab_size * (draft_logits + REJECTION_BYTES_PER_ID)


def shaping_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns a GPU's bytes for penalties, biases and hidden tokens: of each row a count
    and a bit for every token, and a list.
    """
    row = spec.vocab_size * 4 + spec.vocab_size // 8 + 6 * 4 * MAX_ADJUSTMENTS
    return (sizes.max_num_seqs + 1) * row


def kept_logits_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of kept logits, one line for each row, if requests can have
    grammars.
    """
    line = spec.vocab_size * dtype_bytes(spec.dtype)
    return (sizes.max_num_seqs + 1) * line if sizes.late_masks else 0


def _rope_bytes(spec: ModelSpec, sizes: EngineConfig) -> int:
    """Returns the bytes of cosines and sines, a table for each kind of rotation, and of
    factors of queries.
    """
    tables = {(group.attention.rope, group.attention.rotated) for group in spec.groups}
    widths = sum(width for rope, width in tables if rope is not None)
    scales = {group.attention.query_scale for group in spec.groups} - {None}
    return sizes.max_model_len * (widths + len(scales)) * 4


def _layer_input_elements(spec: ModelSpec) -> int:
    """Returns the elements of a token's inputs of layers, as they are made."""
    return 0 if spec.input_table is None else 3 * spec.input_table.line


def _branch_rows(spec: ModelSpec) -> int:
    """Returns the normalised rows of a token that are kept while a layer runs: those that
    the two sublayers of a parallel layer read.
    """
    return 2 * any(layer.parallel for layer in spec.layers)


def _stream_rows(spec: ModelSpec) -> int:
    """Returns the rows of a token that several residual streams take beside one: the
    streams and their predictions, what attention reads, and what LAuReL adds.
    """
    return 0 if spec.altup is None else 2 * spec.altup.streams + 2


def _widest_feed_forward(spec: ModelSpec) -> int:
    """Returns the elements of a token at the widest place of a feed-forward."""
    feed_forwards = spec.feed_forwards
    return max((feed.activation_elements for feed in feed_forwards), default=0)
