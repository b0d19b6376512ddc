"""Which states of recurrent layers are kept, as settings. `minfer.planning.states` has
the policy that they are for.
"""

from attrs import field, frozen

from minfer.values.checks import number

_IN_STATES = "states: "


@frozen(kw_only=True)
class StateKeeping:
    """The settings of the policy. Raises ConfigError for values out of range."""

    # In a prompt, one state per as many blocks, while the pool has free pages; 0: none.
    stride_blocks: int = field(default=16, validator=number(0, prefix=_IN_STATES))
    # In decode, likewise; the state before it is dropped. 0: none.
    decode_stride_blocks: int = field(default=1, validator=number(0, prefix=_IN_STATES))
    # The share of the pool's pages that kept states take, at most.
    max_share: float = field(default=0.3, validator=number(0, 1, prefix=_IN_STATES))
