"""Constants of gated_rule.py's kernels, from `bench.recurrent_gpu --sweep` on an H200,
with states of 128 x 128 in float32. The rule's us of a layer with the tunes below, beside
the bytes' floor (32 heads a row):

    rows       decode   floor      with 3 drafts   floor
       1         5.04    0.99              20.0     1.52
       8         13.6     7.9              40.6     12.2
      64         80.1    63.4               256     97.5
     256          297     254               900      390

The constants of blocks (PREPARE, CARRY) are chosen by what fits.
"""

from typing import Final, NamedTuple

from minfer.kernels.attention_tunes import CAPABILITIES_WITH_99_KB, padded
from minfer.kernels.target import HOPPER, Capability


class RuleTune(NamedTuple):
    """How a kernel divides its work."""

    columns: int  # of a state that a program has
    warps: int
    stages: int = 1  # of loads in flight


DECODE: Final = RuleTune(64, 2)
DECODE_FEW: Final = RuleTune(16, 2)  # fewer states than programs that run at once
FEW_STATES: Final = 128  # of one head each
TOKENS: Final = RuleTune(32, 2)  # rows with several tokens, as with drafts
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


def decode_tune(values: int, states: int, longest: int) -> RuleTune:
    """Returns the tune of the kernel that goes from token to token, for this number of
    states, one a row and head, which take `longest` tokens at most.
    """
    tune = DECODE if states >= FEW_STATES else DECODE_FEW
    if longest > 1:
        tune = TOKENS
    return tune._replace(columns=min(tune.columns, padded(values)))
