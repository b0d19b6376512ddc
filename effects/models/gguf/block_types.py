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
    # Whether the `gguf` package dequantizes it: minfer has no code for it.
    by_package: bool = False

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored one by one."""
        return self.elements == 1


F32: Final = BlockType("F32", 1, 4)
F16: Final = BlockType("F16", 1, 2)
BF16: Final = BlockType("BF16", 1, 2)
Q4_0: Final = BlockType("Q4_0", 32, 18)
MXFP4: Final = BlockType("MXFP4", 32, 17)
# Types whose matrices can stay in 4 bits in memory.
KEPT: Final = (MXFP4, Q4_0)
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
    39: MXFP4,
    # Of two and three bits, and types with tables
    10: BlockType("Q2_K", 256, 84, by_package=True),
    11: BlockType("Q3_K", 256, 110, by_package=True),
    16: BlockType("IQ2_XXS", 256, 66, by_package=True),
    17: BlockType("IQ2_XS", 256, 74, by_package=True),
    18: BlockType("IQ3_XXS", 256, 98, by_package=True),
    19: BlockType("IQ1_S", 256, 50, by_package=True),
    20: BlockType("IQ4_NL", 32, 18, by_package=True),
    21: BlockType("IQ3_S", 256, 110, by_package=True),
    22: BlockType("IQ2_S", 256, 82, by_package=True),
    23: BlockType("IQ4_XS", 256, 136, by_package=True),
    29: BlockType("IQ1_M", 256, 56, by_package=True),
    34: BlockType("TQ1_0", 256, 54, by_package=True),
    35: BlockType("TQ2_0", 256, 66, by_package=True),
}
# Types that are not supported, which errors name.
_NAMES: Final[Mapping[int, str]] = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    40: "NVFP4",
    41: "Q1_0",
}


def type_name(number: int) -> str:
    """Returns the name of a type that is not supported, or its id."""
    return _NAMES.get(number, f"with the unknown id {number}")
