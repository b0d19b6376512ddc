"""The types of tensors in GGUF files: their ids, and the sizes of their blocks."""

from collections.abc import Mapping
from typing import Final

from attrs import frozen


@frozen
class BlockType:
    """A supported type. Each row of a tensor is divided into blocks."""

    name: str
    elements: int  # numbers in a block
    size: int  # bytes of a block

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored one by one."""
        return self.elements == 1


F32: Final = BlockType("F32", 1, 4)
F16: Final = BlockType("F16", 1, 2)
BF16: Final = BlockType("BF16", 1, 2)
Q4_0: Final = BlockType("Q4_0", 32, 18)
# By their ids in files (`ggml_type`).
TYPES: Final[Mapping[int, BlockType]] = {
    0: F32,
    1: F16,
    2: Q4_0,
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BF16,
}
# Types that are not supported, which errors name.
_NAMES: Final[Mapping[int, str]] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def type_name(number: int) -> str:
    """Returns the name of a type that is not supported, or its id."""
    return _NAMES.get(number, f"with the unknown id {number}")
