"""Tiles of a leaf's matrix in Triton: loaded as they are stored, then multiplied.

All kernels of products decode by these functions. The dtypes say how numbers are stored:
bytes are two of 4 bits (with scales in bytes or in FP8: FP4, else integers), else a
number is an element. `group` is the scheme's; 0: scales, if there are any, multiply the
sums. `extras` are zeros of groups, or of scales in FP8 a float32 factor of each line.

Arithmetic. Activations stay as they are, unlike in the schemes of 8 bits: with few tokens
memory is the limit, and this is more exact. Numbers of few bits are exact in the
activations' dtype. A pass within one group multiplies numbers, and scales its sums in
float32; one with several groups rounds scaled weights to the activations' dtype, as
`quantized.dequantize` does. Integers are centred on 8, so a zero point z is z - 8.

Two of 4 bits: those of even inputs, in the low halves, are multiplied with the even
activations, the others with the odd ones. No weights change places: a product sums over
its inputs in any order. On Hopper few instructions make bfloat16 of four bytes, two
numbers at once: under the exponent of 128, the integer q is 128 + q; bits of FP4 and FP8
are those of a bfloat16 whose exponent is 126 or 120 too small.

One token. A product of few instructions keeps up with memory: a thread that holds 16
bytes of weights loads what they are multiplied with (`load_row`), so that nothing is
exchanged between threads, and sums their products before it scales the sum.

Many tokens. The tensor cores are the limit then, and both steps above keep them waiting:
the split moves activations from shared memory through registers and back, and sums are
scaled only when a pass's products are complete. `dequantized` tiles avoid both: weights
are scaled and put in the order of inputs, in registers, while the tensor cores multiply
those of the pass before.
"""

from typing import Any, Final

import triton
import triton.language as tl

from minfer.kernels.pdl import prefetch

ZERO_POINT = tl.constexpr(8)
# Four bytes to four low and four high halves, in pairs of bfloat16.
INTEGERS: Final = tl.constexpr("""{
.reg .b32 a, b, c, d, m;
mov.b32 m, 0x43084308;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
sub.rn.bf16x2 $0, a, m;
sub.rn.bf16x2 $1, b, m;
sub.rn.bf16x2 $2, c, m;
sub.rn.bf16x2 $3, d, m;
}""")
FP4: Final = tl.constexpr("""{
.reg .b32 a, b, c, d, e, m;
mov.b32 m, 0x7e807e80;
prmt.b32 c, $4, 0, 0x1404;
prmt.b32 d, $4, 0, 0x3424;
shl.b32 a, c, 4;
shl.b32 b, d, 4;
shr.u32 e, a, 6;
and.b32 e, e, 0x01c001c0;
lop3.b32 a, a, 0x80008000, e, 0xea;
mul.rn.bf16x2 $0, a, m;
shr.u32 e, b, 6;
and.b32 e, e, 0x01c001c0;
lop3.b32 b, b, 0x80008000, e, 0xea;
mul.rn.bf16x2 $1, b, m;
shr.u32 e, c, 6;
and.b32 e, e, 0x01c001c0;
lop3.b32 c, c, 0x80008000, e, 0xea;
mul.rn.bf16x2 $2, c, m;
shr.u32 e, d, 6;
and.b32 e, e, 0x01c001c0;
lop3.b32 d, d, 0x80008000, e, 0xea;
mul.rn.bf16x2 $3, d, m;
}""")
# Four numbers of FP8 to bfloat16.
FP8: Final = tl.constexpr("""{
.reg .b32 a, b, c, d, m;
mov.b32 m, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xea;
lop3.b32 b, b, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, a, m;
mul.rn.bf16x2 $1, b, m;
}""")
# Four numbers of FP8 to float32.
WIDE_FP8: Final = tl.constexpr("""{
.reg .b16 a, b, c, d;
.reg .b32 low, high;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 low, a;
cvt.rn.f16x2.e4m3x2 high, b;
mov.b32 {a, b}, low;
mov.b32 {c, d}, high;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}""")


@triton.constexpr_function
def is_packed(values: Any) -> bool:
    """Whether elements of this, or of what it points to, are two numbers each."""
    kind = values.type.scalar
    return bool((kind.element_ty if kind.is_ptr() else kind) == tl.uint8)


@triton.jit
def leaf_lines(weight, scales, extras, line, size: tl.constexpr, group: tl.constexpr):
    """Where lines [lines] of a matrix, or of several, begin: weights, scales and extras
    of groups, as far as there are any.
    """
    line = line.to(tl.int64)[:, None]
    per_element: tl.constexpr = 2 if is_packed(weight) else 1
    groups: tl.constexpr = (size + group - 1) // group if group else 1
    leaf = (weight + line * (size // per_element),)
    if group:
        leaf += (scales + line * groups,)  # type: ignore[assignment]  # tuples grow
        if extras is not None:
            stride: tl.constexpr = 1 if extras.dtype.element_ty == tl.float32 else groups
            leaf += (extras + line * stride,)  # type: ignore[assignment]  # as above
    return leaf


@triton.jit
def load_tile(
    leaf,
    k,
    limit,
    full: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
):
    """A tile [lines, depth] of `leaf_lines` from input k on, as it is stored: weights,
    and scales and zeros [lines, groups], or factors [lines, 1]. full: no input is beyond
    `limit`. With a limit of 0 nothing is read.
    """
    per_element: tl.constexpr = 2 if is_packed(leaf[0]) else 1
    lane = k // per_element + tl.arange(0, depth // per_element)[None, :]
    tile = (
        tl.load(leaf[0] + lane, mask=(lane < limit // per_element) | full, other=0.0),
    )
    for i in tl.static_range(1, len(leaf)):
        if i == 2 and leaf[i].dtype.element_ty == tl.float32:
            exists = (tl.arange(0, 1)[None, :] < limit) | full
            tile += (tl.load(leaf[i], mask=exists, other=0.0),)  # type: ignore[assignment]  # as above
        else:
            index = k // group + tl.arange(0, max(depth // group, 1))[None, :]
            tile += (
                tl.load(leaf[i] + index, mask=(index * group < limit) | full, other=0.0),
            )  # type: ignore[assignment]  # as above
    return tile


@triton.jit
def prefetch_lines(weight, k, size: tl.constexpr, depth: tl.constexpr):
    """Prefetch a tile of lines [lines, 1] to the cache, 32 bytes at once."""
    per_element: tl.constexpr = 2 if is_packed(weight) else 1
    step: tl.constexpr = 256 // weight.dtype.element_ty.primitive_bitwidth
    ahead = tl.arange(0, max(depth // per_element // step, 1))[None, :] * step
    prefetch(weight + tl.minimum(k // per_element + ahead, size // per_element - 1))


@triton.constexpr_function
def summed_lanes(weight: Any, depth: int, group: int) -> int:
    """How many elements of a line of weights `add_lanes` sums: 16 bytes, which a thread
    loads at once, or a group's.
    """
    kind = weight.type.scalar
    bits = (kind.element_ty if kind.is_ptr() else kind).primitive_bitwidth
    inputs = min(depth, group or depth)
    return int(min(128 // bits, inputs // 2 if is_packed(weight) else inputs))


@triton.jit
def no_sums(lines: tl.constexpr, weight, depth: tl.constexpr, group: tl.constexpr):
    """Zeros, to which `add_lanes` adds [lines, sums of a line]."""
    lanes: tl.constexpr = depth // 2 if is_packed(weight) else depth
    sums: tl.constexpr = lanes // summed_lanes(weight, depth, group)
    return tl.zeros([lines, sums], tl.float32)


@triton.jit
def load_row(x, k, limit, full: tl.constexpr, weight, depth: tl.constexpr):
    """Inputs [1, depth] of a row from k on, to be multiplied with a tile of `weight`: a
    thread has those of its 16 bytes of weights, and loads them in parts of 16 bytes.
    full: as in `load_tile`.
    """
    elements: tl.constexpr = summed_lanes(weight, depth, 0)
    held: tl.constexpr = 2 * elements if is_packed(weight) else elements
    part: tl.constexpr = min(128 // x.dtype.element_ty.primitive_bitwidth, held)
    lane = k + tl.arange(0, depth // held)[:, None] * held + tl.arange(0, part)[None, :]
    parts = ()
    for first in tl.static_range(0, held, part):
        mask = (lane + first < limit) | full
        parts += (tl.load(x + first + lane, mask=mask, other=0.0),)  # type: ignore[assignment]  # a tuple of Triton grows
    return tl.reshape(_joined(parts), [1, depth])


@triton.jit
def _joined(parts):
    """Parts [chunks, inputs] of one size as [chunks, all inputs]."""
    half: tl.constexpr = len(parts) // 2
    if half == 0:
        joined = parts[0]
    else:
        pair = tl.join(_joined(parts[:half]), _joined(parts[half:]))
        size: tl.constexpr = 2 * pair.shape[1]
        joined = tl.reshape(tl.permute(pair, (0, 2, 1)), [pair.shape[0], size])
    return joined


@triton.jit
def add_lanes(acc, tile, y, in_parts: tl.constexpr = False):
    """acc of `no_sums` plus products of a tile with one row y [1, depth]. in_parts: y is
    of `load_row`.
    """
    lines: tl.constexpr = acc.shape[0]
    sums: tl.constexpr = acc.shape[1]
    lanes: tl.constexpr = tile[0].shape[1]
    y = y.to(tl.float32)
    if is_packed(tile[0]):
        even, odd = _pairs(tile, tl.float32)
        y0, y1 = tl.split(tl.reshape(y, [1, lanes, 2]))
        products = even * y0 + odd * y1
    else:
        w = _in_place(tile[0]) if in_parts else tile[0].to(tl.float32)
        products = w * y
    products = tl.sum(tl.reshape(products, [lines, sums, lanes // sums]), 2)
    if len(tile) > 1:
        products *= _spread(_factors(tile), sums)
    return acc + products


@triton.jit
def add_products(
    acc, tile, y, swapped: tl.constexpr, y_scale=None, dequantized: tl.constexpr = False
):
    """acc [rows, lines] plus products of rows y [rows, depth] with a tile, by tensor
    cores. swapped: acc is [lines, rows], and weights are the first operand, as tensor
    cores take 64 lines of that, and 8 of the second. y_scale [rows, 1]: what the products
    of each row are multiplied with, if the tile is of one group. dequantized: products
    are with scaled weights in the order of inputs.
    """
    groups: tl.constexpr = tile[1].shape[1] if len(tile) > 1 else 0
    if groups == 1 and not dequantized:
        sums = _add_dots(tl.zeros_like(acc), tile, y, False, swapped, False)
        factor = _factors(tile)
        if y_scale is not None:
            sums *= tl.trans(y_scale) if swapped else y_scale
        acc += sums * (factor if swapped else tl.trans(factor))
    else:
        acc = _add_dots(acc, tile, y, groups > 0, swapped, dequantized)
    return acc


@triton.jit
def scaled_tile(tile):
    """The weights [lines, depth] of a tile in float32."""
    lanes: tl.constexpr = tile[0].shape[1]
    factor = _spread(_factors(tile), lanes)
    if is_packed(tile[0]):
        even, odd = _pairs(tile, tl.float32)
        wide = tl.interleave(even * factor, odd * factor)
    else:
        wide = tile[0].to(tl.float32) * factor
    return wide


@triton.jit
def _add_dots(
    acc,
    tile,
    y,
    scaled: tl.constexpr,
    swapped: tl.constexpr,
    in_order: tl.constexpr,
):
    """acc plus products; scaled: of weights times their scales. in_order: weights of 4
    bits are put in the order of inputs; else activations are split into those of even and
    of odd inputs.
    """
    lanes: tl.constexpr = tile[0].shape[1]
    if is_packed(tile[0]):
        even, odd = _pairs(tile, y.dtype)
        if scaled:
            factor = _spread(_factors(tile).to(even.dtype), lanes)
            even *= factor
            odd *= factor
        if in_order:
            w = tl.interleave(even.to(y.dtype), odd.to(y.dtype))
            acc = _dot(acc, w, y, swapped)
        else:
            y0, y1 = tl.split(tl.reshape(y, [y.shape[0], lanes, 2]))
            acc = _dot(acc, even.to(y.dtype), y0, swapped)
            acc = _dot(acc, odd.to(y.dtype), y1, swapped)
    else:
        w = _numbers(tile[0], y.dtype)
        if scaled:
            w = w.to(tl.float32) * _spread(_factors(tile), lanes)
        acc = _dot(acc, w.to(y.dtype), y, swapped)
    return acc


@triton.jit
def _dot(acc, w, y, swapped: tl.constexpr):
    left, right = (w, tl.trans(y)) if swapped else (y, tl.trans(w))
    return tl.dot(left, right, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def _factors(tile):
    """The scales of a tile in float32; bytes are exponents, of which 0 is the smallest
    number, and those in FP8 have a factor.
    """
    s = tile[1]
    if s.dtype == tl.uint8:
        bits = s.to(tl.int32)
        wide = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    else:
        wide = s.to(tl.float32)
    if s.dtype == tl.float8e4nv:
        wide *= tile[2]
    return wide


@triton.jit
def _spread(values, lanes: tl.constexpr):
    """Values [lines, groups] for each of the lanes. Of one group too: a broadcast alone
    would keep the compiler from moving bytes, not numbers, to where they are multiplied.
    """
    lines: tl.constexpr = values.shape[0]
    groups: tl.constexpr = values.shape[1]
    wide = tl.broadcast_to(values[:, :, None], [lines, groups, lanes // groups])
    return tl.reshape(wide, [lines, lanes])


@triton.jit
def _numbers(w, dtype: tl.constexpr):
    """Numbers of 8 bits or more in this type, NaN excepted."""
    fp8: tl.constexpr = (w.dtype == tl.float8e4nv) and (dtype == tl.bfloat16)
    if fp8 and tl.target_info.cuda_capability_geq(9, 0):
        w = tl.inline_asm_elementwise(
            FP8, "=r,=r,r", [w], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        w = w.to(dtype)
    return w


@triton.jit
def _in_place(w):
    """Numbers of 8 bits or more in float32, by the threads that loaded them in the order
    in which they did. Else the compiler would put bytes in the order of a row's parts.
    """
    if w.dtype == tl.float8e4nv and tl.target_info.cuda_capability_geq(9, 0):
        w = tl.inline_asm_elementwise(
            WIDE_FP8, "=r,=r,=r,=r,r", [w], tl.float32, is_pure=True, pack=4
        )
    else:
        w = w.to(tl.float32)
    return w


@triton.jit
def _pairs(tile, dtype: tl.constexpr):
    """The numbers of low and high halves of bytes, less their zeros: in bfloat16 if that
    is asked for on Hopper, else in float32.
    """
    fp4: tl.constexpr = tile[1].dtype == tl.uint8 or tile[1].dtype == tl.float8e4nv
    kind: tl.constexpr = dtype if dtype == tl.bfloat16 else tl.float32
    if (dtype != tl.float16) and tl.target_info.cuda_capability_geq(9, 0):
        low, high = tl.inline_asm_elementwise(
            FP4 if fp4 else INTEGERS,
            "=r,=r,=r,=r,r",
            [tile[0]],
            (tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = _half(tile[0] & 15, fp4), _half(tile[0] >> 4, fp4)
    low, high = low.to(kind), high.to(kind)
    if len(tile) > 2 and not fp4:
        middle = _spread(tile[2].to(kind) - ZERO_POINT, tile[0].shape[1])
        low -= middle
        high -= middle
    return low, high


@triton.jit
def _half(code, fp4: tl.constexpr):
    """The numbers of 4 bits in float32: FP4, or integers less 8."""
    if fp4:
        exponent = (code >> 1 & 3).to(tl.int32)
        digit = (code & 1).to(tl.int32)
        size = tl.where(exponent == 0, digit, 2 + digit << exponent >> 1)  # halves
        number = tl.where(code > 7, -size, size).to(tl.float32) * 0.5
    else:
        number = code.to(tl.float32) - ZERO_POINT
    return number
