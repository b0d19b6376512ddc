"""Checkpoints whose matrices are quantized as others publish them, beside copies of the
numbers that they mean.

Each format is written number by number, as its documentation says, and by nothing of
minfer's.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
# A matrix [outputs, inputs] to its tensors, by the ends of their names, and what they
# mean.
Writer = Callable[[Tensor], tuple[Tensors, Tensor]]
GROUP: Final = 32
BLOCK: Final = 128
MATRIX: Final = re.compile(
    r".*(layers|\.h)\.\d+\..*"
    r"(_proj|_mqa|\.w[123]|query_key_value|dense\w*|c_fc\w*)\.weight"
)
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def rounded(matrix: Tensor, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from 0 to 15 [outputs, inputs], zeros and scales [outputs, groups]."""
    groups = matrix.float().view(len(matrix), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    if zeros:
        scales = ((high - low) / 15).half().float()
        zero = (-low / scales).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7).half().float()
        zero = torch.full_like(scales, 8)
    numbers = (groups / scales[..., None] + zero[..., None]).round().clamp(0, 15)
    return numbers.view(matrix.shape).int(), zero.int(), scales


def meant(numbers: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The numbers that integers, zeros and scales mean."""
    wide = numbers.float().view(*scales.shape, GROUP) - zeros[..., None]
    return (wide * scales[..., None]).view(numbers.shape)


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Rows of numbers, eight in an int32: the first of `order` in the lowest bits."""
    words = torch.zeros(len(numbers), -(-numbers.shape[1] // 8), dtype=torch.int64)
    for place in range(words.shape[1]):
        for slot, which in enumerate(order):
            column = 8 * place + which
            if column < numbers.shape[1]:
                words[:, place] += numbers[:, column].long() << 4 * slot
    return (words - (words >> 31 << 32)).int()


def awq(matrix: Tensor) -> tuple[Tensors, Tensor]:
    numbers, zeros, scales = rounded(matrix, zeros=True)
    tensors = {
        "qweight": packed(numbers.t(), AWQ_ORDER),
        "qzeros": packed(zeros.t(), AWQ_ORDER),
        "scales": scales.t().half(),
    }
    return tensors, meant(numbers, zeros, scales)


def gptq(matrix: Tensor, *, less: int = 1, zeros: bool = True) -> tuple[Tensors, Tensor]:
    numbers, zero, scales = rounded(matrix, zeros=zeros)
    tensors = {
        "qweight": packed(numbers).t(),  # along the inputs
        "qzeros": packed((zero.t() - less) % 16),
        "scales": scales.t().half(),
        "g_idx": (torch.arange(matrix.shape[1]) // GROUP).int(),
    }
    return tensors, meant(numbers, zero, scales)


def gptq_v2(matrix: Tensor) -> tuple[Tensors, Tensor]:
    tensors, copy = gptq(matrix, less=0, zeros=False)
    del tensors["g_idx"]
    return tensors, copy


def compressed_int4(matrix: Tensor) -> tuple[Tensors, Tensor]:
    numbers, zeros, scales = rounded(matrix, zeros=False)
    tensors = {
        "weight_packed": packed(numbers),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(matrix.shape),
    }
    return tensors, meant(numbers, zeros, scales.bfloat16().float())


def compressed_zeros(matrix: Tensor) -> tuple[Tensors, Tensor]:
    numbers, zeros, scales = rounded(matrix, zeros=True)
    tensors = {
        "weight_packed": packed(numbers),
        "weight_scale": scales,
        "weight_zero_point": packed(zeros.t()).t(),
        "weight_shape": torch.tensor(matrix.shape),
    }
    return tensors, meant(numbers, zeros, scales)


def compressed_channel(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scales = (matrix.float().abs().amax(-1, keepdim=True) / 7).half().float()
    numbers = (matrix / scales + 8).round().clamp(0, 15)
    tensors = {"weight_packed": packed(numbers), "weight_scale": scales}
    return tensors, (numbers - 8) * scales


def int8_rows(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scales = matrix.float().abs().amax(-1, keepdim=True) / 127
    numbers = (matrix / scales).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers * scales


def fp8_rows(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scales = matrix.float().abs().amax(-1, keepdim=True) / 448
    numbers = (matrix / scales).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def fp8_static(matrix: Tensor) -> tuple[Tensors, Tensor]:
    scale = matrix.float().abs().max() / 448
    numbers = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(2.0)}
    return tensors, numbers.float() * scale


def fp8_transformers(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """As transformers writes a matrix with one scale."""
    tensors, copy = fp8_static(matrix)
    scales = {
        "weight_scale_inv": tensors["weight_scale"].view(1, 1),
        "activation_scale": tensors["input_scale"],
    }
    return {"weight": tensors["weight"], **scales}, copy


def fp8_exponents(matrix: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks whose scales are powers of two, in 8 bits."""
    tensors, _ = fp8_blocks(matrix)
    scales = tensors["weight_scale_inv"].log2().ceil().exp2()
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: matrix.shape[0], : matrix.shape[1]]
    numbers = (matrix / wide).to(torch.float8_e4m3fn)
    exponents = scales.to(torch.float8_e8m0fnu)
    copy = numbers.float() * wide
    return {"weight": numbers, "weight_scale_inv": exponents}, copy


def fp8_blocks(matrix: Tensor, name: str = "weight_scale_inv") -> tuple[Tensors, Tensor]:
    outputs, inputs = matrix.shape
    down, across = -(-outputs // BLOCK), -(-inputs // BLOCK)
    scales, copy = torch.zeros(down, across), torch.zeros(matrix.shape)
    numbers = torch.zeros(matrix.shape).to(torch.float8_e4m3fn)
    for i in range(down):
        for j in range(across):
            rows, columns = (slice(BLOCK * k, BLOCK * (k + 1)) for k in (i, j))
            block = matrix[rows, columns].float()
            scales[i, j] = block.abs().max() / 448
            numbers[rows, columns] = (block / scales[i, j]).to(torch.float8_e4m3fn)
            copy[rows, columns] = numbers[rows, columns].float() * scales[i, j]
    return {"weight": numbers, name: scales}, copy


def compressed_blocks(matrix: Tensor) -> tuple[Tensors, Tensor]:
    return fp8_blocks(matrix, "weight_scale")


FP4: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nvfp4(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of FP4, two in a byte, scales in FP8 and a factor; and what they mean."""
    groups = matrix.float().view(len(matrix), -1, 16)
    factor = groups.abs().max() / 448 / 6
    scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    wide = (scales.float() * factor)[..., None]
    codes = (groups / wide)[..., None].sub(FP4).abs().argmin(-1)
    pairs = codes.view(len(matrix), -1, 2)
    stored = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    return stored, scales, factor, (FP4[codes] * wide).view(matrix.shape)


def compressed_nvfp4(matrix: Tensor) -> tuple[Tensors, Tensor]:
    stored, scales, factor, copy = nvfp4(matrix)
    tensors = {
        "weight_packed": stored,
        "weight_scale": scales,
        "weight_global_scale": 1 / factor.view(1),
        "input_global_scale": torch.tensor([3.0]),
    }
    return tensors, copy


def modelopt_nvfp4(matrix: Tensor) -> tuple[Tensors, Tensor]:
    stored, scales, factor, copy = nvfp4(matrix)
    tensors = {
        "weight": stored,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(3.0),
    }
    return tensors, copy


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None) -> Any:
    """A `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_ROWS: Final = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
_INT4: Final = {"num_bits": 4, "type": "int", "group_size": GROUP, "strategy": "group"}
_AWQ: Final = {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ: Final = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_FP4: Final = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
_BLOCKS: Final = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
_DEEPSEEK: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
# A format, as its config says, and its writer.
FORMATS: Final[dict[str, tuple[dict[str, Any], Writer]]] = {
    "awq": ({"quant_method": "awq", **_AWQ}, awq),
    "gptq": ({"quant_method": "gptq", **_GPTQ}, gptq),
    "gptq v2": (
        {"quant_method": "gptq", **_GPTQ, "checkpoint_format": "gptq_v2"},
        gptq_v2,
    ),
    "4 bits": (compressed({**_INT4, "symmetric": True}, None), compressed_int4),
    "4 bits, zeros": (compressed({**_INT4, "symmetric": False}, None), compressed_zeros),
    "4 bits, rows": (
        compressed({"num_bits": 4, "type": "int", "strategy": "channel"}, None),
        compressed_channel,
    ),
    "int8": (
        compressed(
            {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"},
        ),
        int8_rows,
    ),
    "fp8 rows": (
        compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, _ROWS),
        fp8_rows,
    ),
    "fp8 blocks": (
        compressed({"num_bits": 8, "type": "float", **_BLOCKS}, _ROWS),
        compressed_blocks,
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_static),
    "fp8, transformers": (
        {"quant_method": "fp8", "weight_block_size": None},
        fp8_transformers,
    ),
    "fp8, deepseek": (_DEEPSEEK, fp8_blocks),
    "nvfp4": (compressed(_FP4, _FP4 | {"dynamic": "local"}), compressed_nvfp4),
    "nvfp4, modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        modelopt_nvfp4,
    ),
    "fp8, exponents": (_DEEPSEEK | {"scale_fmt": "ue8m0"}, fp8_exponents),
}


def quantized(
    folder: Path, target: Path, name: str, keep: Callable[[str], bool] = lambda _: False
) -> tuple[Path, Path]:
    """Write a checkpoint's quantized form, and a copy with the numbers that it means;
    returns their folders. Matrices to `keep` stay as they are.
    """
    config, writer = FORMATS[name]
    stored: Tensors = {}
    copy: Tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        if MATRIX.fullmatch(key) is None or keep(key):
            stored[key] = copy[key] = tensor
            continue
        tensors, copy[key] = writer(tensor)
        stem = key.removesuffix("weight")
        stored |= {stem + end: tensor.contiguous() for end, tensor in tensors.items()}
    base_config = json.loads((folder / "config.json").read_text())
    for out_folder, tensors, extra_config in (
        (target / "quantized", stored, {"quantization_config": config}),
        (target / "copy", copy, {}),
    ):
        out_folder.mkdir()
        save_file(tensors, out_folder / "model.safetensors", {"format": "pt"})
        (out_folder / "config.json").write_text(json.dumps(base_config | extra_config))
    return target / "quantized", target / "copy"
