"""Constants of gated_rule.py's kernels. Not measured yet: chosen by what fits."""

from typing import Final, NamedTuple

from minfer.kernels.attention_tunes import CAPABILITIES_WITH_99_KB, padded
from minfer.kernels.target import HOPPER, Capability


class RuleTune(NamedTuple):
    """How a kernel divides its work."""

    columns: int  # of a state that a program has
    warps: int
    stages: int = 1  # of loads in flight


DECODE: Final = RuleTune(32, 4)
PREPARE_WARPS: Final = 4  # 159 registers a thread
# Shared memory by the stages of loads, with 128 keys: 168 KB with 3, 115 KB with 2.
CARRY: Final = RuleTune(32, 4, 3)
CARRY_WIDE: Final = RuleTune(32, 4, 2)  # more than 128 keys
CARRY_SMALL: Final = RuleTune(32, 4, 1)  # 99 KB for a program, or 163
WIDE_KEYS: Final = 128
# Tokens of a block; under decays of each channel, whose products are not of matrices.
BLOCK: Final = 64
CHANNEL_BLOCK: Final = 16
# Chunks that may be longer go block by block; the others token by token.
MAX_RECURRENT_TOKENS: Final = 16


def carry_tune(keys: int, values: int, target: Capability) -> RuleTune:
    """Returns the tune of the kernel that goes from block to block."""
    tune = CARRY_WIDE if keys > WIDE_KEYS else CARRY
    if target < HOPPER or target in CAPABILITIES_WITH_99_KB:
        tune = CARRY_SMALL
    return tune._replace(columns=min(tune.columns, padded(values)))


def decode_tune(values: int) -> RuleTune:
    """Returns the tune of the kernel that goes from token to token."""
    return DECODE._replace(columns=min(DECODE.columns, padded(values)))
