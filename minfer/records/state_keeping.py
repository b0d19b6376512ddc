"""Settings of the policy that decides which states of recurrent layers are kept; the
policy itself is in `minfer.planning.states`.
"""

from typing import Final

from attrs import field, frozen

from minfer.values.checks import number

_IN_STATES = "states: "
# 20 states of Qwen3-Next, which are 1.5 GB: an H200 copies them in less than a
# millisecond, and those of 256 rows in ten.
MAX_SAVED_PAGES: Final = 1024


@frozen(kw_only=True)
class StateKeeping:
    """The settings of the policy. Raises ConfigError for values out of range."""

    # In a prompt, the least distance in blocks between kept states, which are kept only
    # while the pool has free pages; 0: none are kept.
    stride_blocks: int = field(default=16, validator=number(0, prefix=_IN_STATES))
    # In decode, the distance in blocks; each state replaces the one before it. 0: none
    # are kept.
    decode_stride_blocks: int = field(default=1, validator=number(0, prefix=_IN_STATES))
    # Whether the state at the end of every prompt is kept, or only where further samples
    # of the request start from it.
    every_prompt: bool = True
    # A prefill chunk of at least this many inputs goes on after a position where a state
    # is kept: the executor keeps it inside the chunk. 0: every chunk ends there.
    inside_from: int = field(default=0, validator=number(0, prefix=_IN_STATES))
    # The share of the pool's pages that kept states take, at most.
    max_share: float = field(default=0.3, validator=number(0, 1, prefix=_IN_STATES))
    # The pages that one step copies to keep states, at most; one state is always allowed,
    # however large it is.
    max_saved_pages: int = field(
        default=MAX_SAVED_PAGES, validator=number(1, prefix=_IN_STATES)
    )
